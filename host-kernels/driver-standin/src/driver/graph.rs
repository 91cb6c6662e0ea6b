//! Graphs of launches.

use std::ffi::{c_int, c_uint};

use cudarc::driver::sys;

use super::entry::{HANDLE, INVALID, enqueue, entries};
use super::launch::launch_of;
use crate::argument::{In, Out};
use crate::codes::{Answer, Code};
use crate::context::{Context, new_handle};
use crate::function::Launch;
use crate::graph::{Exec, Graph, Node};
use crate::settings::settings;

/// The first driver with edges of a type in graphs, and the first GPUs with programmatic ones.
const TYPED_EDGES: c_int = 12_030;
const PROGRAMMATIC: u32 = 9;

fn connect(graph: u64, from: u64, to: u64) -> Answer {
    let context = Context::current()?;
    let mut objects = context.objects();
    objects
        .graphs
        .get_mut(&graph)
        .ok_or(HANDLE)?
        .connect(from, to)
}

entries! {
    // Graphs.
    cuGraphCreate(graph: Out<u64>, flags: c_uint) {
        let context = Context::current()?;
        if flags != 0 {
            return Err(INVALID);
        }
        let handle = new_handle();
        graph.put(handle)?;
        context.objects().graphs.insert(handle, Graph::default());
        Ok(())
    }
    cuGraphDestroy(graph: u64) {
        let context = Context::current()?;
        let mut objects = context.objects();
        let removed = objects.graphs.remove(&graph).ok_or(HANDLE)?;
        for node in removed.nodes {
            objects.nodes.remove(&node);
        }
        Ok(())
    }
    cuGraphAddKernelNode_v2(
        node: Out<u64>,
        graph: u64,
        before: In<u64>,
        count: usize,
        params: In<sys::CUDA_KERNEL_NODE_PARAMS>,
    ) {
        let context = Context::current()?;
        // SAFETY: the caller guarantees the lists in `params`, and what the parameters name until
        // the last run of the node, as `cuda.h` asks.
        let launch = unsafe { launch_of(&context, &params.get()?, false) }?;
        let mut objects = context.objects();
        let objects = &mut *objects;
        let of = objects.graphs.get_mut(&graph).ok_or(HANDLE)?;
        let handle = new_handle();
        of.nodes.push(handle);
        let connected = (0..count).try_for_each(|index| of.connect(before.at(index)?, handle));
        if let Err(code) = connected {
            of.nodes.pop();
            return Err(code);
        }
        objects.nodes.insert(handle, Node { launch });
        node.put(handle)
    }
    cuGraphKernelNodeSetAttribute(
        node: u64,
        which: c_uint,
        value: In<sys::CUlaunchAttributeValue>,
    ) {
        let context = Context::current()?;
        let card = context.card();
        let mut objects = context.objects();
        let node = objects.nodes.get_mut(&node).ok_or(HANDLE)?;
        if which != sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE as c_uint {
            return Err(INVALID);
        }
        // SAFETY: the attribute says that the caller has set this member.
        let cooperative = unsafe { value.get()?.cooperative } != 0;
        let changed = Launch {
            cooperative,
            ..node.launch.clone()
        };
        changed.check(card)?;
        node.launch = changed;
        Ok(())
    }
    cuGraphAddDependencies(graph: u64, from: In<u64>, to: In<u64>, count: usize) {
        (0..count).try_for_each(|index| connect(graph, from.at(index)?, to.at(index)?))
    }
    cuGraphAddDependencies_v2(
        graph: u64,
        from: In<u64>,
        to: In<u64>,
        edges: In<sys::CUgraphEdgeData>,
        count: usize,
    ) {
        let context = Context::current()?;
        if settings().version < TYPED_EDGES {
            return Err(Code::CUDA_ERROR_NOT_SUPPORTED);
        }
        for index in 0..count {
            let edge = edges.at(index)?;
            let is_programmatic = match (edge.type_, edge.from_port, edge.to_port) {
                (0, 0, 0) => false,
                (1, 1 | 2, 0) => true,
                _ => return Err(INVALID),
            };
            if is_programmatic && context.card().capability.0 < PROGRAMMATIC {
                return Err(Code::CUDA_ERROR_NOT_SUPPORTED);
            }
            connect(graph, from.at(index)?, to.at(index)?)?;
        }
        Ok(())
    }
    cuGraphInstantiateWithFlags(exec: Out<u64>, graph: u64, flags: u64) {
        let context = Context::current()?;
        if flags != 0 {
            return Err(INVALID);
        }
        let mut objects = context.objects();
        let order = objects.graphs.get(&graph).ok_or(HANDLE)?.order();
        let launches = { order.iter() }
            .filter_map(|node| Some((*node, objects.nodes.get(node)?.launch.clone())));
        let new = Exec {
            launches: launches.collect(),
            order,
        };
        let handle = new_handle();
        exec.put(handle)?;
        objects.execs.insert(handle, new);
        Ok(())
    }
    cuGraphExecDestroy(exec: u64) {
        let context = Context::current()?;
        let removed = context.objects().execs.remove(&exec);
        removed.map(|_| ()).ok_or(HANDLE)
    }
    cuGraphExecKernelNodeSetParams_v2(
        exec: u64,
        node: u64,
        params: In<sys::CUDA_KERNEL_NODE_PARAMS>,
    ) {
        let context = Context::current()?;
        let is_cooperative = {
            let objects = context.objects();
            let exec = objects.execs.get(&exec).ok_or(HANDLE)?;
            exec.launches.get(&node).ok_or(INVALID)?.cooperative
        };
        // SAFETY: the caller guarantees the lists in `params`, and what the parameters name until
        // the last run of the node, as `cuda.h` asks.
        let launch = unsafe { launch_of(&context, &params.get()?, is_cooperative) }?;
        let mut objects = context.objects();
        let exec = objects.execs.get_mut(&exec).ok_or(HANDLE)?;
        exec.launches.insert(node, launch);
        Ok(())
    }
    cuGraphLaunch(exec: u64, stream: u64) {
        let context = Context::current()?;
        let launches: Vec<Launch> = {
            let objects = context.objects();
            let exec = objects.execs.get(&exec).ok_or(HANDLE)?;
            { exec.order.iter() }
                .filter_map(|node| exec.launches.get(node).cloned())
                .collect()
        };
        enqueue(&context, stream, move || {
            // SAFETY: the callers that gave the parameters of each launch guarantee what these name
            // until the last run of the graph, and the queue runs the launches in order.
            launches.iter().try_for_each(|launch| unsafe { launch.run() })
        })?;
        Ok(())
    }
}
