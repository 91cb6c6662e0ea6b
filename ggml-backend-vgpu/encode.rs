//! From a `ggml_cgraph` to the graph IR.

use std::collections::HashMap;
use std::hash::BuildHasherDefault;
use std::ptr;

use rustc_hash::FxHasher;
use vgpu_transport::ir::{
    BufferId, Capabilities, Graph, MAX_SOURCES, Node, Refusal, Shape, Sources, Tensor,
};

use crate::abi::{GGML_TENSOR_FLAG_COMPUTE, ggml_cgraph, ggml_tensor};
use crate::buffer::Buffer;
use crate::device::Device;
use crate::session::{Session, SessionError};
use crate::translate::{Meaning, Translator};

/// Why a graph cannot be sent.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub(crate) enum EncodeError {
    /// ggml gave us a node that `supports_op` refuses.
    #[error("node `{name}`: this is not an operation of the vGPU")]
    Unknown { name: String },
    /// The same: MAP_CUSTOM or CUSTOM.
    #[error(
        "node `{name}` calls a function of this program by its address, which cannot run on another machine: \
         leave it to the CPU backend, as ggml's scheduler does"
    )]
    Callback { name: String },
    /// The same, for a reason that the IR knows.
    #[error("node `{name}`: {refusal}")]
    Refused { name: String, refusal: Refusal },
    /// A tensor is not in our memory.
    #[error("tensor `{name}` is not in a buffer of this device's present session")]
    Foreign { name: String },
    /// Nothing to do with the graph.
    #[error(transparent)]
    Session(#[from] SessionError),
}

/// Translates graphs; keeps its memory from one to the next.
#[derive(Default)]
pub(crate) struct Encoder {
    graph: Graph,
    /// Index in `graph.tensors` by the tensor's address.
    tensors: HashMap<*const ggml_tensor, u32, BuildHasherDefault<FxHasher>>,
}

// SAFETY: the addresses in `tensors` are keys, never followed, and dropped with the next graph.
unsafe impl Send for Encoder {}

impl Encoder {
    /// The graph in the IR. Nodes that compute nothing are left out.
    ///
    /// # Safety
    ///
    /// `cgraph` and everything it points to must be a valid graph made by the ggml of this process, and
    /// stay unchanged during the call.
    pub(crate) unsafe fn encode(
        &mut self,
        device: &Device,
        session: &Session,
        cgraph: &ggml_cgraph,
    ) -> Result<&Graph, EncodeError> {
        self.graph.buffers.clear();
        self.graph.tensors.clear();
        self.graph.nodes.clear();
        self.tensors.clear();
        let translator = device.translator();
        for i in 0..usize::try_from(cgraph.n_nodes).unwrap_or(0) {
            // SAFETY: `nodes` has n_nodes entries, each a tensor (the caller's promise).
            let node = unsafe { &**cgraph.nodes.add(i) };
            if skips(node) {
                continue;
            }
            // SAFETY: a tensor of the host (the caller's promise).
            match unsafe { translator.meaning(node) } {
                Some(Meaning::Nothing) => {}
                Some(Meaning::Compute { op, sources }) => {
                    let mut src = [None; MAX_SOURCES];
                    for (src, &source) in src.iter_mut().zip(&node.src[..sources]) {
                        // SAFETY: null or a tensor of the graph (the caller's promise).
                        if let Some(source) = unsafe { source.as_ref() } {
                            // SAFETY: as above.
                            *src = Some(unsafe { self.tensor(device, session, source) }?);
                        }
                    }
                    // SAFETY: as above.
                    let dst = unsafe { self.tensor(device, session, node) }?;
                    self.graph.nodes.push(Node {
                        op,
                        dst,
                        src: Sources::new(src),
                    });
                    self.check(session, node)?;
                }
                // SAFETY: as above.
                None if unsafe { translator.calls_back(node) } => {
                    return Err(EncodeError::Callback { name: name(node) });
                }
                None => return Err(EncodeError::Unknown { name: name(node) }),
            }
        }
        Ok(&self.graph)
    }

    /// What the host would answer to the last node: better said here, with the name of the tensor.
    fn check(&self, session: &Session, tensor: &ggml_tensor) -> Result<(), EncodeError> {
        let Some(node) = self.graph.nodes.last() else {
            return Ok(());
        };
        let mut src = [None; MAX_SOURCES];
        let count = node.src.as_slice().len();
        for (i, shape) in src.iter_mut().take(count).enumerate() {
            *shape = self.graph.src(node, i).map(|t| &t.shape);
        }
        let capabilities = &session.welcome.capabilities;
        capabilities
            .accept(&node.op, &self.graph.dst(node).shape, &src[..count])
            .map_err(|refusal| EncodeError::Refused {
                name: name(tensor),
                refusal,
            })
    }

    /// The index of a tensor, which is added when it is new.
    ///
    /// # Safety
    ///
    /// As for [`encode`](Encoder::encode).
    unsafe fn tensor(
        &mut self,
        device: &Device,
        session: &Session,
        tensor: &ggml_tensor,
    ) -> Result<u32, EncodeError> {
        if let Some(&index) = self.tensors.get(&ptr::from_ref(tensor)) {
            return Ok(index);
        }
        // SAFETY: a tensor of the host (the caller's promise).
        let shape = unsafe { device.translator().shape(tensor) };
        let shape = shape.ok_or_else(|| EncodeError::Unknown { name: name(tensor) })?;
        // SAFETY: the buffer of a tensor of the graph is alive.
        let place = unsafe { Buffer::of_tensor(device, tensor) };
        let (id, offset) = place
            .filter(|buffer| ptr::eq(&**buffer.session(), session))
            .and_then(|buffer| {
                Some((
                    buffer.id_for_graph(),
                    buffer.offset_of(tensor.data as usize)?,
                ))
            })
            .ok_or_else(|| EncodeError::Foreign { name: name(tensor) })?;
        let index = self.graph.tensors.len() as u32;
        let buffer = self.buffer(id);
        self.graph.tensors.push(Tensor {
            shape,
            buffer,
            offset,
        });
        self.tensors.insert(tensor, index);
        Ok(index)
    }

    /// The index of a buffer in the graph. There are a handful, the latest is the likeliest.
    fn buffer(&mut self, id: BufferId) -> u32 {
        let known = self.graph.buffers.iter().rposition(|&buffer| buffer == id);
        known.unwrap_or_else(|| {
            self.graph.buffers.push(id);
            self.graph.buffers.len() - 1
        }) as u32
    }
}

/// Whether a node is not to be computed: it has no element, or ggml has not marked it (every version we
/// know marks).
fn skips(node: &ggml_tensor) -> bool {
    node.ne.contains(&0) || node.flags & GGML_TENSOR_FLAG_COMPUTE as i32 == 0
}

/// Whether the device computes `op`: `supports_op`.
///
/// # Safety
///
/// `op` and its sources must be tensors made by the host of `translator`.
pub(crate) unsafe fn supports(
    translator: &Translator,
    capabilities: &Capabilities,
    op: &ggml_tensor,
) -> bool {
    // SAFETY: a tensor of the host (the caller's promise).
    let (meaning, dst) = unsafe { (translator.meaning(op), translator.shape(op)) };
    let (Some(meaning), Some(dst)) = (meaning, dst) else {
        return false;
    };
    let Meaning::Compute {
        op: operator,
        sources,
    } = meaning
    else {
        return true;
    };
    let mut shapes: [Option<Shape>; MAX_SOURCES] = [None; MAX_SOURCES];
    let mut count = 0;
    for (i, (shape, &source)) in shapes.iter_mut().zip(&op.src[..sources]).enumerate() {
        // SAFETY: null or a tensor of the host (the caller's promise).
        if let Some(source) = unsafe { source.as_ref() } {
            // SAFETY: as above.
            match unsafe { translator.shape(source) } {
                Some(known) => *shape = Some(known),
                None => return false,
            }
            count = i + 1;
        }
    }
    let src = shapes.each_ref().map(Option::as_ref);
    capabilities.accept(&operator, &dst, &src[..count]).is_ok()
}

/// The label of a tensor.
fn name(tensor: &ggml_tensor) -> String {
    let bytes: Vec<u8> = tensor
        .name
        .iter()
        .map(|&c| c.cast_unsigned())
        .take_while(|&c| c != 0)
        .collect();
    String::from_utf8_lossy(&bytes).into_owned()
}
