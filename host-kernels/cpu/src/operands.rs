//! A node during compilation: its operands, and what earlier nodes have prepared for it.

use std::cell::Cell;
use std::sync::Arc;

use vgpu_transport::ir::{Node, Op};

use crate::gemm::Activation;
use crate::kernel::JointKernel;
use crate::view::View;

/// The state that nodes pass to later nodes during compilation: the tensor that was converted last,
/// and its format. The products of one tensor with several weights (Q, K and V; gate and up) begin
/// with the same activations, which are converted once.
#[derive(Default)]
pub(crate) struct ActivationCache {
    cached: Cell<Option<(View, Activation)>>,
    /// Size of the largest converted tensor.
    bytes: Cell<usize>,
    /// The tensor that the first kernel of the current node converts, if the kernel only converts.
    converts: Cell<Option<View>>,
    /// The tensor that the current node computes row by row.
    makes: Cell<Option<View>>,
    /// The tensor that the node before it computes row by row.
    made: Cell<Option<View>>,
    /// The last kernel of the current node, if plans can run it together.
    joint: Cell<Option<Arc<dyn JointKernel>>>,
    /// Bytes that the last kernel of the current node has allocated, if they are more than a few.
    held: Cell<usize>,
}

/// What compiling a node has recorded in the [`ActivationCache`].
pub(crate) struct Recorded {
    /// The tensor that the first kernel converts, if the kernel only converts.
    pub(crate) converts: Option<View>,
    /// Whether each thread reads only rows of that tensor that the same thread has computed in the
    /// kernel before.
    pub(crate) follows: bool,
    /// The last kernel, if plans can run it together.
    pub(crate) joint: Option<Arc<dyn JointKernel>>,
    /// Bytes that the last kernel has allocated.
    pub(crate) held: usize,
}

impl ActivationCache {
    /// Takes what the node that was just compiled has recorded.
    pub(crate) fn take_recorded(&self) -> Recorded {
        let converts = self.converts.take();
        let made = self.made.take();
        self.made.set(self.makes.take());
        Recorded {
            converts,
            follows: converts.is_some() && made == converts,
            joint: self.joint.take(),
            held: self.held.take(),
        }
    }

    /// Drops the converted activations if `view`, which is written, overlaps their source.
    pub(crate) fn invalidate(&self, view: &View) {
        if { self.cached.get() }.is_some_and(|(source, _)| source.overlaps(view)) {
            self.cached.set(None);
        }
    }

    /// Bytes of memory for converted activations.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.get()
    }
}

/// The operator and the operands of a validated node, and the state of the compilation.
///
/// A kernel computes addresses in one tensor from the lengths of others and from parameters of the
/// operator. That these addresses are inside the tensor follows from the operator's check
/// ([`check`](vgpu_transport::ir::check())), and a value of this type is the proof that the node
/// has passed it. So a function that compiles a node takes the node's operands as this type, and
/// says with [`parameters!`] which operator's check its arguments refer to.
pub(crate) struct Operands<'a> {
    views: &'a [View],
    node: &'a Node,
    cache: &'a ActivationCache,
    workers: usize,
}

/// Declares the parameters of the operator that a function compiles:
/// `parameters!(operands, Op::Roll { shift });`.
///
/// # Panics
/// If the node has another operator.
macro_rules! parameters {
    ($operands:expr, $op:pat_param) => {
        let $op = *$operands.op() else {
            unreachable!("{:?} has another kernel", $operands.op())
        };
    };
}
pub(crate) use parameters;

impl<'a> Operands<'a> {
    /// The operands of a node, whose kernels `workers` threads run.
    ///
    /// # Safety
    /// - `node` is a node of a graph that [`validate`](vgpu_transport::ir::validate()) has accepted
    ///   with the rules of this engine ([`rules`](crate::ops::rules));
    /// - `views` are the views of the tensors of this graph, in order, as [`View::new`] makes them
    ///   from the shapes of the tensors;
    /// - the plan runs the kernels of the node with no more than `workers` threads, with as many
    ///   bytes of scratch memory as the kernels were compiled for, and with
    ///   [`bytes`](ActivationCache::bytes) of `cache` for converted activations.
    pub(crate) unsafe fn new(
        node: &'a Node,
        views: &'a [View],
        cache: &'a ActivationCache,
        workers: usize,
    ) -> Operands<'a> {
        Operands {
            views,
            node,
            cache,
            workers,
        }
    }
}

impl Operands<'_> {
    /// The operator with its parameters.
    #[inline]
    pub(crate) fn op(&self) -> &Op {
        &self.node.op
    }

    /// The destination.
    #[inline]
    pub(crate) fn dst(&self) -> View {
        self.views[self.node.dst as usize]
    }

    /// Source `i`, which the operator's rules require.
    #[inline]
    pub(crate) fn src(&self, i: usize) -> View {
        self.optional(i)
            .expect("validation refuses operations without a source they need")
    }

    /// The first `N` sources, all of which the operator's rules require.
    #[inline]
    pub(crate) fn sources<const N: usize>(&self) -> [View; N] {
        std::array::from_fn(|i| self.src(i))
    }

    /// Source `i`, if there is one.
    #[inline]
    pub(crate) fn optional(&self, i: usize) -> Option<View> {
        let index = self.node.src.as_slice().get(i).copied().flatten()?;
        Some(self.views[index as usize])
    }

    /// Whether the activation memory ([`Worker::activations`](crate::kernel::Worker::activations))
    /// already holds `source` as `activation` from an earlier node. If not, this node's first
    /// kernel must write it there: `bytes` bytes, for this node and later nodes.
    pub(crate) fn cache_activations(
        &self,
        source: View,
        activation: Activation,
        bytes: usize,
    ) -> bool {
        let cache = self.cache;
        cache.bytes.set(cache.bytes.get().max(bytes));
        cache.cached.replace(Some((source, activation))) == Some((source, activation))
    }

    /// Declares that the node has one kernel, in which each thread computes its
    /// [range](crate::kernel::Worker::range_of) of the rows of `view` and accesses no memory of
    /// other rows.
    pub(crate) fn makes_rows(&self, view: View) {
        self.cache.makes.set(Some(view));
    }

    /// Whether the node before has computed `view` in this way. Then a kernel that takes the same
    /// range of rows need not wait for other threads.
    pub(crate) fn follows_rows(&self, view: View) -> bool {
        self.cache.made.get() == Some(view)
    }

    /// Declares that the first kernel reads `source`, which is the node's second source, writes the
    /// [activation memory](Operands::cache_activations), and accesses no other memory.
    pub(crate) fn converts_first(&self, source: View) {
        self.cache.converts.set(Some(source));
    }

    /// Declares that the last kernel of the node has allocated so many bytes.
    pub(crate) fn holds(&self, bytes: usize) {
        self.cache.held.set(bytes);
    }

    /// Declares that the last kernel of the node is `kernel`, which plans can run together.
    pub(crate) fn ends_with(&self, kernel: Arc<dyn JointKernel>) {
        self.cache.joint.set(Some(kernel));
    }

    /// The number of threads that run each kernel.
    #[inline]
    pub(crate) fn workers(&self) -> usize {
        self.workers
    }
}
