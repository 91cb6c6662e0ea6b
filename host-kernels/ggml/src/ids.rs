//! The ids of the enums of one ggml, by name.
//!
//! The values differ between releases, the names do not. ggml keeps the names in arrays that
//! `ggml_op_name` and its siblings index without a bounds check, and no function returns their
//! lengths. A node that ggml itself makes has an id in range. `GLU` is the last operator of every
//! supported release, so a GLU node bounds the operators. The same holds for `TRUNC` of the unary
//! operators. `GEGLU_QUICK` is the last GLU kind but one or the last. `SWIGLU_CLAMP`, if there is
//! a constructor for it, is the next.
//!
//! Types need no table: their ids are those of GGUF files, which never change, and every supported
//! release has all types of the IR.

use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_void};

use vgpu_ggml_abi as abi;
use vgpu_transport::ir::{GluKind, OpKind, UnaryKind};

use crate::loader::{Handle, LibraryError, text};

/// `GGML_TYPE_F32`.
const F32: c_int = 0;

/// Operators of ggml that the IR does not have under the same name.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Extra {
    pub(crate) rope_back: Option<c_int>,
    pub(crate) unary: Option<c_int>,
    pub(crate) xielu: Option<c_int>,
}

/// The ids of one ggml.
#[derive(Debug)]
pub(crate) struct Ids {
    ops: BTreeMap<&'static str, c_int>,
    unary: BTreeMap<&'static str, c_int>,
    glu: BTreeMap<&'static str, c_int>,
    extra: Extra,
}

impl Ids {
    /// Asks ggml.
    ///
    /// # Errors
    /// [`LibraryError::Symbol`] if ggml lacks a function.
    pub(crate) fn of(ggml: &Handle) -> Result<Ids, LibraryError> {
        type Name = unsafe extern "C" fn(c_int) -> *const c_char;
        type Make = unsafe extern "C" fn(
            *mut abi::ggml_context,
            *mut abi::ggml_tensor,
        ) -> *mut abi::ggml_tensor;
        let init: unsafe extern "C" fn(abi::ggml_init_params) -> *mut abi::ggml_context;
        let free: unsafe extern "C" fn(*mut abi::ggml_context);
        let tensor: unsafe extern "C" fn(
            *mut abi::ggml_context,
            c_int,
            i64,
        ) -> *mut abi::ggml_tensor;
        let (trunc, geglu): (Make, Make);
        let (op_name, unary_name, glu_name): (Name, Name, Name);
        let has_clamp;
        // SAFETY: these types are those of the declarations in vendor/, which tests/abi.rs compares
        // with ggml's headers. `ggml_swiglu_clamp` is not called.
        unsafe {
            init = ggml.function(c"ggml_init")?;
            free = ggml.function(c"ggml_free")?;
            tensor = ggml.function(c"ggml_new_tensor_1d")?;
            trunc = ggml.function(c"ggml_trunc")?;
            geglu = ggml.function(c"ggml_geglu_quick")?;
            op_name = ggml.function(c"ggml_op_name")?;
            unary_name = ggml.function(c"ggml_unary_op_name")?;
            glu_name = ggml.function(c"ggml_glu_op_name")?;
            has_clamp = ggml.function::<*const c_void>(c"ggml_swiglu_clamp").is_ok();
        }
        let (unary_op, last_unary, glu_op, last_glu);
        // SAFETY: a context of 64 KiB holds three tensors without elements. The tensors are read
        // before the context is freed. The constructors take a tensor of F32 with an even row.
        unsafe {
            let context = init(abi::ggml_init_params {
                mem_size: 1 << 16,
                mem_buffer: std::ptr::null_mut(),
                no_alloc: true,
            });
            let operand = tensor(context, F32, 32);
            let (trunc, geglu) = (trunc(context, operand), geglu(context, operand));
            (unary_op, last_unary) = ((*trunc).op, (*trunc).op_params[0]);
            (glu_op, last_glu) = ((*geglu).op, (*geglu).op_params[0]);
            free(context);
        }
        let names = |name: Name, last: c_int| -> Vec<(String, c_int)> {
            (0..=last)
                // SAFETY: ids up to that of a node of this ggml are in range, and the answer is
                // null or a string literal.
                .map(|id| (unsafe { text(name(id)) }, id))
                .collect()
        };
        let find = |names: &[(String, c_int)], wanted: &str| {
            { names.iter() }.find_map(|(name, id)| (name == wanted).then_some(*id))
        };
        let ops = names(op_name, glu_op.max(unary_op));
        let unary = names(unary_name, last_unary);
        let glu = names(glu_name, last_glu + c_int::from(has_clamp));
        Ok(Ids {
            extra: Extra {
                rope_back: find(&ops, "ROPE_BACK"),
                unary: find(&ops, "UNARY"),
                xielu: find(&unary, "XIELU"),
            },
            ops: OpKind::ALL
                .iter()
                .filter_map(|op| Some((op.ggml_name(), find(&ops, op.ggml_name())?)))
                .collect(),
            unary: UnaryKind::ALL
                .iter()
                .filter_map(|kind| Some((kind.ggml_name(), find(&unary, kind.ggml_name())?)))
                .collect(),
            glu: GluKind::ALL
                .iter()
                .filter_map(|kind| Some((kind.ggml_name(), find(&glu, kind.ggml_name())?)))
                .collect(),
        })
    }

    /// The operators without an entry of their own.
    pub(crate) fn extra(&self) -> Extra {
        self.extra
    }

    /// `enum ggml_op`. `None` if this ggml lacks the operator.
    pub(crate) fn op(&self, op: OpKind) -> Option<c_int> {
        self.ops.get(op.ggml_name()).copied()
    }

    /// `enum ggml_unary_op`.
    pub(crate) fn unary(&self, kind: UnaryKind) -> Option<c_int> {
        self.unary.get(kind.ggml_name()).copied()
    }

    /// `enum ggml_glu_op`.
    pub(crate) fn glu(&self, kind: GluKind) -> Option<c_int> {
        self.glu.get(kind.ggml_name()).copied()
    }
}
