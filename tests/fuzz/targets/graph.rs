//! Graph images: decoded, validated, patched. Every tensor of a valid graph is inside its buffer.
//! The target computes the byte ranges independently.

use std::sync::OnceLock;

use vgpu_cpu::CpuEngine;
use vgpu_engine::Engine;
use vgpu_transport::ir::{BufferId, Capabilities, Graph, Limits, Tensor, patch, validate};

/// Bytes of the buffers 1, 2, ...
const SIZES: [u64; 4] = [64, 4096, 1 << 20, u64::MAX];

const LIMITS: Limits = Limits {
    nodes: 64,
    revisits: 8,
};

pub(crate) fn run(data: &[u8]) {
    static CAPABILITIES: OnceLock<Capabilities> = OnceLock::new();
    let capabilities = CAPABILITIES.get_or_init(|| {
        let engine = CpuEngine::new(1, Some(1 << 20)).expect("a thread");
        engine.capabilities().clone()
    });
    let words: Vec<u32> = data
        .chunks_exact(4)
        .map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
        .collect();
    patches(&words);
    let Ok(graph) = Graph::decode(&words) else {
        return;
    };
    let again = graph.encode();
    assert_eq!(
        Graph::decode(&again).expect("what was decoded").encode(),
        again
    );
    let size_of = |id: BufferId| SIZES.get((id.0 as usize).wrapping_sub(1)).copied();
    let Ok(valid) = validate(graph, capabilities, &LIMITS, size_of) else {
        return;
    };
    let graph = valid.graph();
    assert!(graph.nodes.len() <= LIMITS.nodes);
    for tensor in &graph.tensors {
        let id = graph.buffers[tensor.buffer as usize];
        let size = size_of(id).expect("validation knows its buffers");
        assert!(
            end(tensor) <= u128::from(size),
            "{tensor:?} in {size} bytes"
        );
    }
}

/// The end of a tensor, computed without overflow.
fn end(tensor: &Tensor) -> u128 {
    let shape = &tensor.shape;
    if shape.ne.contains(&0) {
        return u128::from(tensor.offset);
    }
    let blocks = u128::from(shape.ne[0] / shape.ty.block_elements());
    let row = (blocks.max(1) - 1) * u128::from(shape.nb[0]) + u128::from(shape.ty.block_bytes());
    let rows = (1..4).map(|i| u128::from(shape.ne[i] - 1) * u128::from(shape.nb[i]));
    u128::from(tensor.offset) + row + rows.sum::<u128>()
}

/// The first half as an image, the second as a patch, and both as images with a patch from one to
/// the other.
fn patches(words: &[u32]) {
    let (base, rest) = words.split_at(words.len() / 2);
    if let Ok(image) = patch::apply(base, rest) {
        assert_eq!(image.len(), base.len());
    }
    let new = &rest[..base.len()];
    if let Some(patch) = patch::diff(base, new, words.len() * 4) {
        assert_eq!(patch::apply(base, &patch).as_deref(), Ok(new));
    }
}
