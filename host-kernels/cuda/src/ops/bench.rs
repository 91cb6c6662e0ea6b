//! A bench for unit tests: runs the launches of single operators on the CPU.

use std::sync::Arc;

use vgpu_transport::ir::{BufferId, Graph, Node, Op, Shape, Sources, Tensor, Type};

use crate::activation_cache::{ACTIVATION_CACHE_BYTES, ActivationCache};
use crate::context::ExecutionContext;
use crate::device::{Address, Device};
use crate::launch::builder::Builder;
use crate::launch::policy::LaunchPolicy;
use crate::launch::q8::Q8Activations;
use crate::params::*;
use vgpu_engine::EngineError;
use vgpu_gguf::Rng;

type Added = Option<Result<(), EngineError>>;

// The file, not a crate: a crate with the device would depend on this one, and in a unit test its
// `Device` would be the trait of another build of this crate.
#[allow(dead_code, unreachable_pub)]
#[path = "../../../shim/device.rs"]
mod shim;

/// A device with the tensors of a test, which are not freed.
pub(crate) struct Bench {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) context: ExecutionContext,
    graph: Graph,
    rng: Rng,
}

impl Bench {
    pub(crate) fn new() -> Bench {
        Bench::on(shim::Shim::default())
    }

    /// A bench with the kernels for sm_90a.
    pub(crate) fn on_sm90() -> Bench {
        Bench::on(shim::Shim::sm90())
    }

    fn on(device: shim::Shim) -> Bench {
        let device: Arc<dyn Device> = Arc::new(device);
        let tensor = Tensor {
            shape: Shape::contiguous(Type::F32, [1; 4]).expect("one element"),
            buffer: 0,
            offset: 0,
        };
        Bench {
            context: ExecutionContext::new(
                Arc::clone(&device),
                LaunchPolicy::default(),
                Arc::default(),
            )
            .expect("a context"),
            device,
            graph: Graph {
                buffers: vec![BufferId(1)],
                tensors: vec![tensor; 2],
                nodes: vec![Node {
                    op: Op::Sqr {},
                    dst: 1,
                    src: Sources::new([Some(0)]),
                }],
            },
            rng: Rng::new(1, 0),
        }
    }

    pub(crate) fn random(&mut self) -> f32 {
        (self.rng.next_u64() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    /// A dense tensor of these bytes.
    pub(crate) fn tensor(&self, ty: Type, ne: [u64; 4], bytes: &[u8]) -> VgView {
        let address = self
            .device
            .alloc(bytes.len() as u64)
            .expect("little memory");
        // SAFETY: the memory was just allocated with this size.
        unsafe { self.device.upload(address, bytes.into()) }.expect("a copy");
        VgView::new(address, &Shape::contiguous(ty, ne).expect("a small shape"))
    }

    pub(crate) fn floats(&self, ne: [u64; 4], values: &[f32]) -> VgView {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.tensor(Type::F32, ne, &bytes)
    }

    /// A dense tensor of random numbers between -1 and 1, and the numbers.
    pub(crate) fn randoms(&mut self, ne: [u64; 4]) -> (VgView, Vec<f32>) {
        let values: Vec<f32> = (0..ne.iter().product()).map(|_| self.random()).collect();
        (self.floats(ne, &values), values)
    }

    /// Random weights of a type: the tensor, and the values of its elements.
    pub(crate) fn weights(&mut self, ty: Type, ne: [u64; 4]) -> (VgView, Vec<f32>) {
        let format = vgpu_cpu::formats::Format::of(ty).expect("a type of real numbers");
        let mut values: Vec<f32> = (0..ne.iter().product()).map(|_| self.random()).collect();
        let mut bytes = vec![0; format.row_bytes(values.len())];
        // SAFETY: both buffers hold `values.len()` elements in whole blocks.
        unsafe {
            (format.quantize_row)(values.as_ptr(), bytes.as_mut_ptr(), values.len());
            (format.dequantize_row)(bytes.as_ptr(), values.as_mut_ptr(), values.len());
        }
        (self.tensor(ty, ne, &bytes), values)
    }

    pub(crate) fn nothing(&self, ty: Type, ne: [u64; 4]) -> VgView {
        let bytes = ne.iter().product::<u64>() * ty.block_bytes();
        self.tensor(ty, ne, &vec![0xa5; bytes as usize])
    }

    pub(crate) fn alloc_q8(&self, x: &VgView) -> Q8Activations {
        let elements = crate::launch::q8::q8_elements(x) as u64;
        let alloc = |bytes| self.device.alloc(bytes).expect("little memory");
        Q8Activations {
            quants: alloc(elements),
            scales: alloc(elements / 2),
        }
    }

    /// The quants, the scale and the sums of each block of 32, at the places that
    /// `kernels/q8_layout.cuh` defines.
    pub(crate) fn blocks(&self, it: &Q8Activations, x: &VgView) -> Vec<(Vec<u8>, [u32; 4])> {
        let elements = crate::launch::q8::q8_elements(x) as usize;
        let (quants, scales) = (
            self.bytes(it.quants, elements),
            self.bytes(it.scales, elements / 2),
        );
        let groups = elements / 1024 / x.rows() as usize;
        let of_row = 0..x.ne[0] as usize / 32;
        let position =
            |row: usize, block: usize| (row * groups + block / 32, block % 32 / 2, block % 2);
        { 0..x.rows() as usize }
            .flat_map(|row| of_row.clone().map(move |block| position(row, block)))
            .map(|(group, chunk, which)| {
                let half =
                    |h: usize| &quants[group * 1024 + (2 * which + h) * 256 + chunk * 16..][..16];
                let number = |at: usize| {
                    let at = group * 512 + chunk * 16 + which * 4 + at;
                    u32::from_le_bytes(scales[at..at + 4].try_into().expect("four"))
                };
                let numbers = [number(0), number(8), number(256), number(264)];
                ([half(0), half(1)].concat(), numbers)
            })
            .collect()
    }

    pub(crate) fn bytes(&self, address: Address, n: usize) -> Vec<u8> {
        let mut bytes = vec![0; n];
        // SAFETY: tests read no more bytes than they have allocated.
        unsafe { self.device.download(address, bytes.as_mut_slice().into()) }.expect("a copy");
        bytes
    }

    pub(crate) fn read(&self, v: &VgView) -> Vec<f32> {
        let bytes = self.bytes(v.data, v.elements() as usize * 4);
        let words = bytes.chunks_exact(4);
        words
            .map(|b| f32::from_le_bytes(b.try_into().expect("four")))
            .collect()
    }

    pub(crate) fn read_ints(&self, v: &VgView) -> Vec<i32> {
        self.read(v)
            .into_iter()
            .map(|x| x.to_bits() as i32)
            .collect()
    }

    /// Runs the launches that `add` adds. Returns whether there were any.
    pub(crate) fn run(&self, add: impl FnOnce(&mut Builder<'_>) -> Added) -> bool {
        let views = [VgView::default(); 2];
        let mut cache = ActivationCache::new(self.context.shared_place());
        let mut builder = Builder::new(&self.graph, &views, 0, &self.context, (&mut cache, 0));
        let Some(outcome) = add(&mut builder) else {
            return false;
        };
        outcome.expect("launches");
        let _claim = self
            .context
            .scratch
            .claim(ACTIVATION_CACHE_BYTES + builder.scratch_bytes())
            .expect("little memory");
        for step in builder.into_launches() {
            // SAFETY: the launch uses tensors of this bench and the scratch memory that was claimed
            // above.
            unsafe { self.device.launch(&step.launch) }.expect("a launch");
        }
        true
    }
}

#[track_caller]
pub(crate) fn compare(
    what: &str,
    got: &[f32],
    want: impl IntoIterator<Item = f64>,
    tolerance: f64,
) {
    let want: Vec<f64> = want.into_iter().collect();
    assert_eq!(got.len(), want.len());
    for (i, (&got, want)) in got.iter().zip(want).enumerate() {
        let off = (f64::from(got) - want).abs();
        assert!(
            off <= tolerance * (1.0 + want.abs()),
            "{what}: {i} is {got}, not {want}"
        );
    }
}

/// Weight rows times columns in f64, with unquantised activations.
pub(crate) fn product(w: &[f32], x: &[f32], k: usize) -> Vec<f64> {
    { x.chunks(k) }
        .flat_map(|x| {
            w.chunks(k).map(move |w| {
                w.iter()
                    .zip(x)
                    .map(|(w, x)| f64::from(*w) * f64::from(*x))
                    .sum()
            })
        })
        .collect()
}
