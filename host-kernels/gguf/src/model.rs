//! A file whose tensors are random.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use rayon::prelude::*;

use crate::container::{self, FileLayout, Metadata};
use crate::error::GgufError;
use crate::random::{self, Rng};
use crate::tensor::Tensor;

/// The rows of a tensor are written in chunks of about this many bytes, in parallel.
const CHUNK_BYTES: u64 = 1 << 20;

/// A tensor with random content: row `r` holds the random numbers of (`stream`, `row(r)`).
#[derive(Clone, Debug)]
pub struct RandomTensor {
    /// Name, dimensions and type.
    pub tensor: Tensor,
    /// Mean of the numbers. Zero for quantised types.
    pub mean: f32,
    /// Standard deviation of the numbers.
    pub sd: f32,
    /// Number of the random stream. Tensors of the same stream have the same numbers.
    pub stream: u32,
    /// For each row, the row of the stream whose numbers it holds. Without it, row `r` holds the
    /// numbers of row `r`.
    pub order: Option<Arc<[u32]>>,
}

impl RandomTensor {
    /// The number of rows: all dimensions but the innermost.
    fn rows(&self) -> u64 {
        self.tensor.dims[1..].iter().product()
    }

    fn row_bytes(&self) -> u64 {
        self.tensor.bytes() / self.rows()
    }

    /// The random numbers of row `row`, which do not depend on other rows.
    ///
    /// # Panics
    ///
    /// If `order` is shorter than `row`.
    pub fn rng(&self, seed: u64, row: u64) -> Rng {
        let source = self
            .order
            .as_ref()
            .map_or(row, |order| u64::from(order[row as usize]));
        Rng::new(seed, u64::from(self.stream) << 32 | source)
    }
}

/// A GGUF file with random tensors, laid out.
#[derive(Debug)]
pub struct RandomModel {
    layout: FileLayout,
    tensors: Vec<RandomTensor>,
    seed: u64,
}

/// Consecutive rows of a tensor.
struct RowChunk<'a> {
    tensor: &'a RandomTensor,
    rows: Range<u64>,
    /// Offset of the first row from the start of the file.
    offset: u64,
}

impl RandomModel {
    /// Lays the file out. Nothing is written yet.
    ///
    /// # Errors
    ///
    /// If the rows of a tensor are no whole number of blocks, or the tensors are too large for a
    /// file.
    pub fn new(
        metadata: &Metadata,
        tensors: Vec<RandomTensor>,
        seed: u64,
    ) -> Result<RandomModel, GgufError> {
        let table: Vec<_> = tensors.iter().map(|random| random.tensor.clone()).collect();
        let layout = container::lay_out(metadata, &table)?;
        Ok(RandomModel {
            layout,
            tensors,
            seed,
        })
    }

    /// Bytes of the file.
    pub fn file_bytes(&self) -> u64 {
        self.layout.len
    }

    /// Number of weights.
    pub fn parameters(&self) -> u64 {
        { self.tensors.iter() }
            .map(|random| random.tensor.elements())
            .sum()
    }

    /// Writes the file from its start, on all cores. `file` must be a regular file; bytes that it
    /// has are overwritten or cut off. Calls `written` with the length of every chunk written.
    ///
    /// Every call writes the same bytes.
    ///
    /// # Errors
    ///
    /// If the system refuses to write, for example because the disk is full.
    pub fn write(&self, file: &File, written: impl Fn(u64) + Sync) -> Result<(), GgufError> {
        let FileLayout { head, len, .. } = &self.layout;
        // Emptied first: the padding between tensors is not written and must be zero.
        { file.set_len(0).and_then(|()| file.set_len(*len)) }
            .map_err(|error| GgufError::Reserve { len: *len, error })?;
        { file.write_all_at(head, 0) }.map_err(|error| GgufError::WriteHead {
            len: head.len(),
            error,
        })?;
        self.chunks()
            .par_iter()
            .try_for_each_init(Vec::new, |buffer, chunk| {
                self.write_chunk(file, chunk, buffer)?;
                written(buffer.len() as u64);
                Ok(())
            })
    }

    fn chunks(&self) -> Vec<RowChunk<'_>> {
        let mut chunks = Vec::new();
        for (tensor, &start) in self.tensors.iter().zip(&self.layout.offsets) {
            let (row, rows) = (tensor.row_bytes(), tensor.rows());
            let at_once = (CHUNK_BYTES / row).max(1);
            chunks.extend((0..rows).step_by(at_once as usize).map(|first| RowChunk {
                tensor,
                rows: first..rows.min(first + at_once),
                offset: start + first * row,
            }));
        }
        chunks
    }

    fn write_chunk(
        &self,
        file: &File,
        chunk: &RowChunk<'_>,
        buffer: &mut Vec<u8>,
    ) -> Result<(), GgufError> {
        let RowChunk {
            tensor,
            rows,
            offset,
        } = chunk;
        let row_bytes = tensor.row_bytes() as usize;
        buffer.resize(row_bytes * (rows.end - rows.start) as usize, 0);
        for (row, bytes) in rows.clone().zip(buffer.chunks_exact_mut(row_bytes)) {
            let rng = &mut tensor.rng(self.seed, row);
            random::fill(tensor.tensor.kind, tensor.mean, tensor.sd, rng, bytes);
        }
        { file.write_all_at(buffer, *offset) }.map_err(|error| GgufError::WriteTensor {
            name: tensor.tensor.name.clone(),
            offset: *offset,
            len: buffer.len(),
            error,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;
    use crate::tensor::TensorType;

    const TYPES: [TensorType; 8] = [
        TensorType::F32,
        TensorType::F16,
        TensorType::Q4_0,
        TensorType::Q8_0,
        TensorType::Q4K,
        TensorType::Q6K,
        TensorType::Iq4Nl,
        TensorType::Mxfp4,
    ];

    /// A model with a tensor of every type; the last has the rows of the first in reverse.
    fn model(seed: u64) -> RandomModel {
        let mut metadata = Metadata::default();
        metadata.set("general.architecture", "none");
        let mut tensors: Vec<_> = { (0..).zip(TYPES) }
            .map(|(stream, kind)| RandomTensor {
                tensor: Tensor {
                    name: format!("{kind:?}"),
                    dims: vec![256, 3 + u64::from(stream)],
                    kind,
                },
                mean: 0.0,
                sd: 0.1,
                stream,
                order: None,
            })
            .collect();
        let mut reversed = tensors[0].clone();
        reversed.tensor.name = "reversed".into();
        reversed.order = Some([2, 1, 0].into());
        tensors.push(reversed);
        RandomModel::new(&metadata, tensors, seed).unwrap()
    }

    fn written(model: &RandomModel) -> Vec<u8> {
        let file = tempfile::NamedTempFile::new().unwrap();
        let total = AtomicU64::new(0);
        let count = |bytes| {
            total.fetch_add(bytes, Ordering::Relaxed);
        };
        // Longer than the model, to be overwritten.
        std::fs::write(file.path(), vec![0xff; 1 << 17]).unwrap();
        model.write(file.as_file(), count).unwrap();
        let data: u64 = model.tensors.iter().map(|r| r.tensor.bytes()).sum();
        assert_eq!(total.into_inner(), data);
        std::fs::read(file.path()).unwrap()
    }

    /// Callers cache files by their seed.
    #[test]
    fn bytes_of_a_seed_are_fixed_and_do_not_depend_on_threads() {
        let on = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
            pool.build().unwrap().install(|| written(&model(1)))
        };
        let one = on(1);
        assert!(one == on(5));
        assert_eq!(one.len() as u64, model(1).file_bytes());
        assert_ne!(one, written(&model(2)));
        assert_eq!(
            blake3::hash(&one).to_hex().as_str(),
            "f906c9aa48b28df7bac9040fd7bb0a5ae011c4e5228579731c4e0f264c4ad12a"
        );
    }

    #[test]
    fn order_permutes_the_rows_of_a_stream() {
        let (model, file) = (model(1), written(&model(1)));
        let rows = |tensor: usize| {
            let start = model.layout.offsets[tensor] as usize;
            let bytes = model.tensors[tensor].tensor.bytes() as usize;
            file[start..start + bytes].chunks(4 * 256)
        };
        assert!(rows(0).rev().eq(rows(TYPES.len())));
        assert_eq!(rows(0).len(), 3);
    }

    #[test]
    fn a_file_that_refuses_writes_is_an_error_with_its_length() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let read_only = File::open(file.path()).unwrap();
        let error = model(1).write(&read_only, |_| ()).unwrap_err().to_string();
        let len = model(1).file_bytes().to_string();
        assert!(error.contains(&len), "{error}");
    }
}
