//! GGUF files: a file that was read is written with the same content.

use vgpu_gguf::{Metadata, Tensor, TensorType, lay_out};

use super::session::input::Input;

pub(crate) fn run(data: &[u8]) {
    if let Ok(metadata) = Metadata::read(&mut &data[..]) {
        let written = lay_out(&metadata, &[]).expect("metadata alone").head;
        let read = Metadata::read(&mut &written[..]).expect("what was written");
        assert_eq!(lay_out(&read, &[]).expect("metadata alone").head, written);
    }
    // Tensors of any shape are laid out or refused.
    let mut input = Input::new(data);
    let tensors: Vec<Tensor> = (0..input.below(6))
        .map(|i| Tensor {
            name: format!("t{i}"),
            dims: (0..input.below(5)).map(|_| input.odd_number()).collect(),
            kind: input.pick(&[
                TensorType::F32,
                TensorType::F16,
                TensorType::Q4K,
                TensorType::Q6K,
            ]),
        })
        .collect();
    let Ok(layout) = lay_out(&Metadata::default(), &tensors) else {
        return;
    };
    let mut end = layout.head.len() as u64;
    for (tensor, &offset) in tensors.iter().zip(&layout.offsets) {
        assert!(offset >= end, "{tensor:?} at {offset}, before {end}");
        let elements: u128 = tensor.dims.iter().map(|&d| u128::from(d)).product();
        let bytes =
            elements / u128::from(tensor.kind.block_len()) * u128::from(tensor.kind.block_bytes());
        end = offset + u64::try_from(bytes).expect("a size that was laid out");
    }
    assert!(layout.len >= end);
}
