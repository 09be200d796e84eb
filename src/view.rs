//! Borrowed tensors: a raw pointer with a checked extent.
//!
//! This is the one road from a caller's pointer to a slice. A [`View`] is born in [`TensorArg::check`], which has seen rank, dtype,
//! extents, strides, alignment and that the extent does not overflow; after that nobody checks a shape again. Whether the pointer is host or device
//! memory is the backend's business: device pointers are passed on and never become slices.

use crate::abi::types::pkv_tensor;
use crate::dtype::{DType, Plain};
use crate::error::{Error, Result};

/// What a call may do with the memory, and how much can be known of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// `_workspace_size`: shapes and dtypes only, pointers may be NULL.
    Query,
    /// A call on the host: pointers are dereferenced.
    Host,
    /// A call on a device: pointers are passed on, their contents unknown.
    Device,
}

impl Mode {
    /// Whether array contents (row offsets, page table) can be looked at.
    pub fn reads(self) -> bool {
        self == Mode::Host
    }
}

/// What is asked of one extent.
#[derive(Clone, Copy, Debug)]
pub enum Dim {
    /// Exactly this, because of the named thing.
    Is(usize, &'static str),
    /// Anything from 1 up.
    Some,
    /// Anything, 0 included (ragged token counts).
    Any,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Read,
    /// Written: no element may lie at two indices.
    Write,
}

/// `N`-dimensional, strided, innermost contiguous. Strides count elements.
#[derive(Clone, Copy, Debug)]
pub struct View<const N: usize> {
    ptr: *mut u8,
    pub dtype: DType,
    pub shape: [usize; N],
    pub stride: [usize; N],
}

// SAFETY: an address with its extent; the accessors carry the aliasing contract.
unsafe impl<const N: usize> Send for View<N> {}
// SAFETY: as above.
unsafe impl<const N: usize> Sync for View<N> {}

impl<const N: usize> View<N> {
    /// The address as given: for device kernels and raw inner loops.
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr
    }

    pub fn row_len(&self) -> usize {
        self.shape[N - 1]
    }

    /// The columns from `first` on of every row.
    pub fn columns_from(&self, first: usize) -> Self {
        let mut tail = *self;
        tail.shape[N - 1] = self.row_len().checked_sub(first).expect("no more columns than a row has");
        if !self.shape.contains(&0) {
            tail.ptr = self.ptr.wrapping_add(first * self.dtype.size());
        }
        tail
    }

    fn row_ptr<T: Plain, const M: usize>(&self, index: [usize; M]) -> *mut T {
        const { assert!(M + 1 == N) };
        debug_assert_eq!(T::DTYPE, self.dtype);
        let mut offset = 0;
        for (d, i) in index.into_iter().enumerate() {
            debug_assert!(i < self.shape[d], "index {i} of dimension {d} is outside {:?}", self.shape);
            offset += i * self.stride[d];
        }
        // SAFETY: the extent was checked when the view was made, the index lies in the shape.
        unsafe { self.ptr.cast::<T>().add(offset) }
    }

    /// The innermost row at `index`.
    ///
    /// # Safety
    /// Host memory; nobody writes the row while the slice lives.
    pub unsafe fn row<'a, T: Plain, const M: usize>(&self, index: [usize; M]) -> &'a [T] {
        if self.row_len() == 0 {
            return &[];
        }
        // SAFETY: in bounds by row_ptr; the rest by contract.
        unsafe { std::slice::from_raw_parts(self.row_ptr(index), self.row_len()) }
    }

    /// # Safety
    /// Host memory; nobody else reads or writes the row while the slice lives.
    pub unsafe fn row_mut<'a, T: Plain, const M: usize>(&self, index: [usize; M]) -> &'a mut [T] {
        if self.row_len() == 0 {
            return &mut [];
        }
        // SAFETY: in bounds by row_ptr; the rest by contract.
        unsafe { std::slice::from_raw_parts_mut(self.row_ptr(index), self.row_len()) }
    }
}

/// A tensor argument with the name an error will use.
#[derive(Clone, Copy, Debug)]
pub struct TensorArg<'a> {
    pub tensor: &'a pkv_tensor,
    pub name: &'static str,
    pub mode: Mode,
}

impl TensorArg<'_> {
    /// Absent optional tensor: data NULL and dtype NONE.
    pub fn is_absent(&self) -> bool {
        self.tensor.dtype == 0 && self.tensor.data.is_null()
    }

    /// `None` when absent.
    pub fn check_optional<const N: usize>(
        &self,
        dtypes: &[DType],
        dims: [Dim; N],
        access: Access,
    ) -> Result<Option<View<N>>> {
        if self.is_absent() { Ok(None) } else { self.check(dtypes, dims, access).map(Some) }
    }

    pub fn check<const N: usize>(&self, dtypes: &[DType], dims: [Dim; N], access: Access) -> Result<View<N>> {
        let &TensorArg { tensor: t, name, mode } = self;
        if self.is_absent() {
            return Err(Error::null(format!("{name}.data")));
        }
        let dtype = DType::from_abi(t.dtype).filter(|d| dtypes.contains(d)).ok_or_else(|| {
            let allowed: Vec<_> = dtypes.iter().map(|d| d.name()).collect();
            let given = DType::from_abi(t.dtype).map_or(format!("{}", t.dtype), |d| d.name().into());
            Error::dtype(format!("{name}.dtype"), format!("is {given}, must be {}", allowed.join(" or ")))
        })?;
        if t.ndim != N as i32 {
            return Err(Error::shape(format!("{name}.ndim"), format!("is {}, must be {N}", t.ndim)));
        }
        let mut shape = [0usize; N];
        for d in 0..N {
            let extent = t.shape[d];
            let bad = |want: String| Error::shape(format!("{name}.shape[{d}]"), format!("is {extent}, must be {want}"));
            shape[d] = usize::try_from(extent).map_err(|_| bad("at least 0".into()))?;
            match dims[d] {
                Dim::Is(n, what) if shape[d] != n => return Err(bad(format!("{n} ({what})"))),
                Dim::Some if shape[d] == 0 => return Err(bad("at least 1".into())),
                _ => {}
            }
        }
        let stride = strides(t, &shape, name)?;
        let empty = shape.contains(&0);
        let overflow = || {
            Error::shape(
                format!("{name}.shape"),
                format!("{shape:?} with strides {stride:?} spans more than memory can hold"),
            )
        };
        let mut span = 1usize;
        let mut elements = 1usize;
        for d in 0..N {
            elements = elements.checked_mul(shape[d].max(1)).ok_or_else(overflow)?;
            let reach = shape[d].saturating_sub(1).checked_mul(stride[d]).ok_or_else(overflow)?;
            span = span.checked_add(reach).ok_or_else(overflow)?;
        }
        let fits = |n: usize| n.checked_mul(dtype.size()).filter(|&b| b <= isize::MAX as usize);
        let bytes = fits(span).ok_or_else(overflow)?;
        fits(elements).ok_or_else(overflow)?;
        if access == Access::Write && !empty {
            check_no_self_overlap(&shape, &stride, name)?;
        }
        if mode != Mode::Query && !empty {
            check_pointer(t.data.cast(), bytes, dtype.size(), mode, &format!("{name}.data"))?;
        }
        let ptr = if empty { std::ptr::dangling_mut::<u64>().cast() } else { t.data.cast() };
        Ok(View { ptr, dtype, shape, stride })
    }
}

/// NULL, alignment (an element's own on the host, 16 bytes on a device) and wrap-around of a range the caller promises.
pub fn check_pointer(data: *const u8, bytes: usize, align: usize, mode: Mode, name: &str) -> Result<()> {
    if data.is_null() {
        return Err(Error::null(name));
    }
    let align = if mode == Mode::Device { 16 } else { align };
    if !data.addr().is_multiple_of(align) {
        return Err(Error::alignment(name, format!("is {data:p}, must be {align}-byte aligned")));
    }
    if data.addr().checked_add(bytes).is_none() {
        return Err(Error::shape(name, format!("{bytes} bytes at {data:p} run past the end of memory")));
    }
    Ok(())
}

/// All zero = contiguous row-major; else as given, the last one 1 where its dimension has more than one element.
fn strides<const N: usize>(t: &pkv_tensor, shape: &[usize; N], name: &str) -> Result<[usize; N]> {
    let mut stride = [0usize; N];
    if t.stride[..N].iter().all(|&s| s == 0) {
        let mut step = 1usize;
        for d in (0..N).rev() {
            stride[d] = step;
            step = step
                .checked_mul(shape[d].max(1))
                .ok_or_else(|| Error::shape(format!("{name}.shape"), format!("the product of {shape:?} overflows")))?;
        }
        return Ok(stride);
    }
    for (d, (stride, &s)) in stride.iter_mut().zip(&t.stride).enumerate() {
        *stride = usize::try_from(s)
            .map_err(|_| Error::shape(format!("{name}.stride[{d}]"), format!("is {s}, must not be negative")))?;
    }
    if shape[N - 1] > 1 && stride[N - 1] != 1 {
        let message = format!("is {}, must be 1 (the innermost dimension is contiguous)", stride[N - 1]);
        return Err(Error::shape(format!("{name}.stride[{}]", N - 1), message));
    }
    Ok(stride)
}

/// Sorted by stride, each dimension must step over all that the smaller ones reach.
fn check_no_self_overlap<const N: usize>(shape: &[usize; N], stride: &[usize; N], name: &str) -> Result<()> {
    let mut order: Vec<usize> = (0..N).filter(|&d| shape[d] > 1).collect();
    order.sort_by_key(|&d| stride[d]);
    let mut reach = 0usize;
    for d in order {
        if stride[d] <= reach {
            let message = format!("is {}, makes elements of this output overlap (must be above {reach})", stride[d]);
            return Err(Error::shape(format!("{name}.stride[{d}]"), message));
        }
        reach += (shape[d] - 1) * stride[d];
    }
    Ok(())
}

/// A ragged tensor must have a row for every new token of the batch.
pub fn check_rows<const N: usize>(view: &View<N>, tokens: usize, name: &str) -> Result<()> {
    if view.shape[0] < tokens {
        let message = format!("is {}, the batch has {tokens} new tokens", view.shape[0]);
        return Err(Error::shape(format!("{name}.shape[0]"), message));
    }
    Ok(())
}
