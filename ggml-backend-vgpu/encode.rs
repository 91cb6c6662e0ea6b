//! From a `ggml_cgraph` to the graph IR.

use std::collections::HashMap;
use std::hash::BuildHasherDefault;
use std::ptr;
use std::sync::Arc;

use rustc_hash::FxHasher;
use vgpu_transport::ir::{Capabilities, Graph, MAX_SOURCES, Node, Refusal, Shape, Sources, Tensor};

use crate::abi::{GGML_TENSOR_FLAG_COMPUTE, ggml_cgraph, ggml_tensor};
use crate::buffer::Buffer;
use crate::device_context::DeviceContext;
use crate::graph_cache::GraphImage;
use crate::session::{Session, SessionBuffer};
use crate::translate::{Meaning, Translator};

/// Why a graph cannot be encoded. The program's fault, or ggml's.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub(crate) enum EncodeError {
    /// A node that `supports_op` refuses: its operator has no meaning in the IR.
    #[error("node `{name}`: the vGPU does not know this operation")]
    Unknown {
        /// The name of the tensor.
        name: String,
    },
    /// A node that `supports_op` refuses: MAP_CUSTOM or CUSTOM.
    #[error(
        "node `{name}` calls a function of this program, which no other machine has: leave the \
         node to the CPU backend, as ggml's scheduler does"
    )]
    Callback {
        /// The name of the tensor.
        name: String,
    },
    /// A node that `supports_op` refuses: the executor does not compute it.
    #[error("node `{name}`: {refusal}")]
    Refused {
        /// The name of the tensor.
        name: String,
        /// Why.
        refusal: Refusal,
    },
    /// A tensor outside the memory of the session.
    #[error("tensor `{name}` is not in a buffer of this device's present session")]
    ForeignTensor {
        /// The name of the tensor.
        name: String,
    },
}

/// Encodes graphs. Keeps its memory from one graph to the next.
#[derive(Default)]
pub(crate) struct Encoder {
    graph: Graph,
    image: GraphImage,
    /// The index in `graph.tensors` by the address of the tensor.
    tensors: HashMap<*const ggml_tensor, u32, BuildHasherDefault<FxHasher>>,
    /// The buffers of `graph.buffers`.
    buffers: Vec<Arc<SessionBuffer>>,
}

// SAFETY: the pointers in `tensors` are keys of a map, which are compared and never followed.
unsafe impl Send for Encoder {}

/// A graph that was encoded.
pub(crate) struct EncodedGraph<'a> {
    /// The graph in the form that is sent.
    pub(crate) image: &'a mut GraphImage,
    /// The buffers that the graph reads and writes.
    pub(crate) buffers: &'a [Arc<SessionBuffer>],
}

impl Encoder {
    /// Encodes the nodes that compute something. `None` if there are none.
    ///
    /// # Errors
    ///
    /// [`EncodeError`], which names the tensor.
    ///
    /// # Safety
    ///
    /// `cgraph` and everything that it points to must be a valid graph of this process's ggml that
    /// nobody changes during the call.
    pub(crate) unsafe fn encode(
        &mut self,
        device: &DeviceContext,
        session: &Session,
        cgraph: &ggml_cgraph,
    ) -> Result<Option<EncodedGraph<'_>>, EncodeError> {
        self.clear();
        let translator = device.translator();
        for i in 0..usize::try_from(cgraph.n_nodes).unwrap_or(0) {
            // SAFETY: `nodes` has `n_nodes` entries, each a valid tensor, as the caller of this
            // function guarantees.
            let node = unsafe { &**cgraph.nodes.add(i) };
            if is_skipped(node) {
                continue;
            }
            // SAFETY: a valid tensor of this process's ggml: this function's contract.
            match unsafe { translator.meaning(node) } {
                Some(Meaning::Nothing) => {}
                Some(Meaning::Compute { op, sources }) => {
                    let mut src = [None; MAX_SOURCES];
                    for (src, &source) in src.iter_mut().zip(&node.src[..sources]) {
                        // SAFETY: null or a valid tensor, as the caller of this function
                        // guarantees.
                        if let Some(source) = unsafe { source.as_ref() } {
                            // SAFETY: a tensor of the graph: this function's contract.
                            *src = Some(unsafe { self.tensor(device, session, source) }?);
                        }
                    }
                    // SAFETY: a tensor of the graph: this function's contract.
                    let dst = unsafe { self.tensor(device, session, node) }?;
                    self.graph.nodes.push(Node {
                        op,
                        dst,
                        src: Sources::new(src),
                    });
                    self.check_last_node(session, node)?;
                }
                // SAFETY: a valid tensor of this process's ggml: this function's contract.
                None if unsafe { translator.is_callback(node) } => {
                    return Err(EncodeError::Callback { name: name(node) });
                }
                None => return Err(EncodeError::Unknown { name: name(node) }),
            }
        }
        if self.graph.nodes.is_empty() {
            return Ok(None);
        }
        self.image.encode(&self.graph);
        Ok(Some(EncodedGraph {
            image: &mut self.image,
            buffers: &self.buffers,
        }))
    }

    /// Forgets the last graph, so that its buffers can be freed.
    pub(crate) fn clear(&mut self) {
        self.graph.buffers.clear();
        self.graph.tensors.clear();
        self.graph.nodes.clear();
        self.tensors.clear();
        self.buffers.clear();
    }

    /// Checks the last node as the executor will. An error found here names the tensor.
    fn check_last_node(&self, session: &Session, tensor: &ggml_tensor) -> Result<(), EncodeError> {
        let Some(node) = self.graph.nodes.last() else {
            return Ok(());
        };
        let mut src = [None; MAX_SOURCES];
        let count = node.src.as_slice().len();
        for (i, shape) in src.iter_mut().take(count).enumerate() {
            *shape = self.graph.src(node, i).map(|t| &t.shape);
        }
        let capabilities = &session.welcome().capabilities;
        capabilities
            .accept(&node.op, &self.graph.dst(node).shape, &src[..count])
            .map_err(|refusal| EncodeError::Refused {
                name: name(tensor),
                refusal,
            })
    }

    /// The index of a tensor in the graph, which gets the tensor if it does not have it.
    ///
    /// # Safety
    ///
    /// `tensor` must be a tensor of the graph of [`encode`](Encoder::encode).
    unsafe fn tensor(
        &mut self,
        device: &DeviceContext,
        session: &Session,
        tensor: &ggml_tensor,
    ) -> Result<u32, EncodeError> {
        if let Some(&index) = self.tensors.get(&ptr::from_ref(tensor)) {
            return Ok(index);
        }
        // SAFETY: a valid tensor of this process's ggml: this function's contract.
        let shape = unsafe { device.translator().shape(tensor) };
        let shape = shape.ok_or_else(|| EncodeError::Unknown { name: name(tensor) })?;
        // SAFETY: a valid tensor, whose buffer lives during the call of `encode`: this function's
        // contract.
        let buffer = unsafe { Buffer::of_tensor(device, tensor) };
        let (buffer, offset) = buffer
            .filter(|buffer| ptr::eq(&**buffer.session(), session))
            .and_then(|buffer| Some((buffer, buffer.offset_of(tensor.data.addr())?)))
            .ok_or_else(|| EncodeError::ForeignTensor { name: name(tensor) })?;
        let index = self.graph.tensors.len() as u32;
        let buffer = self.buffer(buffer.memory());
        self.graph.tensors.push(Tensor {
            shape,
            buffer,
            offset,
        });
        self.tensors.insert(tensor, index);
        Ok(index)
    }

    /// The index of a buffer in the graph. A graph has a handful of buffers, and the latest is the
    /// likeliest.
    fn buffer(&mut self, buffer: &Arc<SessionBuffer>) -> u32 {
        let id = buffer.id();
        let known = self.graph.buffers.iter().rposition(|&known| known == id);
        known.unwrap_or_else(|| {
            self.graph.buffers.push(id);
            self.buffers.push(Arc::clone(buffer));
            self.graph.buffers.len() - 1
        }) as u32
    }
}

/// Whether a node is not computed: it has no element, or ggml has not marked it. Every supported
/// release marks the nodes to compute.
fn is_skipped(node: &ggml_tensor) -> bool {
    node.ne.contains(&0) || node.flags & GGML_TENSOR_FLAG_COMPUTE as i32 == 0
}

/// Whether an executor with these capabilities computes the node `op`: the answer of `supports_op`.
///
/// # Safety
///
/// `op` and its sources must be valid tensors of the ggml of `translator`.
pub(crate) unsafe fn is_supported(
    translator: &Translator,
    capabilities: &Capabilities,
    op: &ggml_tensor,
) -> bool {
    // SAFETY: a valid tensor, as the caller of this function guarantees.
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
        // SAFETY: null or a valid tensor, as the caller of this function guarantees.
        if let Some(source) = unsafe { source.as_ref() } {
            // SAFETY: a valid tensor, as the caller of this function guarantees.
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

/// The name of a tensor.
fn name(tensor: &ggml_tensor) -> String {
    let bytes: Vec<u8> = tensor
        .name
        .iter()
        .map(|&c| c.cast_unsigned())
        .take_while(|&c| c != 0)
        .collect();
    String::from_utf8_lossy(&bytes).into_owned()
}
