//! Scratch memory of a call: one allocator that counts or carves.
//!
//! `pkv_X_workspace_size` and `pkv_X` run the same layout function over an [`Arena`], the first with nothing behind it, the
//! second over the caller's buffer, so the two cannot disagree.

use crate::error::{Error, Result, Status};
use std::alloc::{Layout, alloc, alloc_zeroed, dealloc};
use std::marker::PhantomData;

/// Alignment of a workspace and of everything carved from it.
pub const ALIGNMENT: usize = 256;

/// A piece of the workspace: `len` elements of `T`, uninitialised. Empty while counting.
#[derive(Debug)]
pub struct Span<T> {
    ptr: *mut T,
    len: usize,
    _element: PhantomData<T>,
}

impl<T> Clone for Span<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Span<T> {}
// SAFETY: a Span is an address; the unsafe accessors carry the aliasing contract.
unsafe impl<T: Send> Send for Span<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Span<T> {}

impl<T: Copy> Span<T> {
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address for a device kernel.
    pub fn as_ptr(&self) -> *mut T {
        self.ptr
    }

    /// # Safety
    /// Host memory; `T` is plain data (any bits are a value); nobody else uses these elements while the slice lives.
    #[allow(clippy::mut_from_ref, reason = "a Span is a shared address; disjointness is the caller's contract")]
    pub unsafe fn slice_mut(&self, start: usize, len: usize) -> &mut [T] {
        assert!(start <= self.len && len <= self.len - start, "workspace span overrun");
        // SAFETY: in bounds as asserted; exclusivity and initialisation by contract.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(start), len) }
    }

    /// # Safety
    /// Host memory, initialised before; nobody writes these elements while the slice lives.
    pub unsafe fn slice(&self, start: usize, len: usize) -> &[T] {
        assert!(start <= self.len && len <= self.len - start, "workspace span overrun");
        // SAFETY: in bounds as asserted; initialised and unwritten by contract.
        unsafe { std::slice::from_raw_parts(self.ptr.add(start), len) }
    }
}

/// Counts (base NULL) or carves. Sizes saturate, so an absurd shape is refused by the size, not by a wrapped sum.
#[derive(Debug)]
pub struct Arena {
    base: *mut u8,
    used: usize,
}

impl Arena {
    pub fn counting() -> Self {
        Arena { base: std::ptr::null_mut(), used: 0 }
    }

    /// # Safety
    /// `base` is `ALIGNMENT`-aligned and has as many bytes as counting the same layout gave.
    pub unsafe fn carving(base: *mut u8) -> Self {
        Arena { base, used: 0 }
    }

    pub fn take<T: Copy>(&mut self, len: usize) -> Span<T> {
        let start = self.used;
        let bytes = len.saturating_mul(size_of::<T>());
        self.used = start.saturating_add(bytes).checked_next_multiple_of(ALIGNMENT).unwrap_or(usize::MAX);
        if self.base.is_null() {
            return Span { ptr: std::ptr::null_mut(), len: 0, _element: PhantomData };
        }
        // SAFETY: by the contract of `carving`, the same sequence of takes fits behind `base`.
        let ptr = unsafe { self.base.add(start) }.cast();
        Span { ptr, len, _element: PhantomData }
    }

    pub fn used(&self) -> usize {
        self.used
    }
}

/// Room, in the unit of `piece` and `budget`, for `count` equal pieces that pass through scratch some at a time: what `budget` holds, but `least` pieces in any
/// case. It does not shrink when there are more pieces or larger ones.
pub fn windowed(count: usize, piece: usize, least: usize, budget: usize) -> usize {
    count.saturating_mul(piece).min(budget.max(count.min(least).saturating_mul(piece)))
}

/// Heap memory that lives as long as one call or one handle.
#[derive(Debug)]
pub struct HostBuffer {
    /// The first aligned address of the allocation.
    ptr: *mut u8,
    len: usize,
    allocation: Option<(*mut u8, Layout)>,
}

// SAFETY: owned memory with no thread affinity.
unsafe impl Send for HostBuffer {}
// SAFETY: shared access is by raw pointer only.
unsafe impl Sync for HostBuffer {}

impl HostBuffer {
    /// Uninitialised, `ALIGNMENT`-aligned.
    pub fn new(bytes: usize, argument: &str) -> Result<Self> {
        Self::with(bytes, ALIGNMENT, argument, |layout| {
            // SAFETY: `with` passes a layout of non-zero size.
            unsafe { alloc(layout) }
        })
    }

    /// Uninitialised, in huge pages where whole ones fit: what is streamed again and again misses the TLB less.
    pub fn huge(bytes: usize, argument: &str) -> Result<Self> {
        const HUGE: usize = 2 << 20;
        if bytes < HUGE {
            return Self::new(bytes, argument);
        }
        // The room to align in is never touched, so it costs addresses, not memory.
        let buffer = Self::with(bytes, HUGE, argument, |layout| {
            // SAFETY: `with` passes a layout of non-zero size.
            unsafe { alloc(layout) }
        })?;
        #[cfg(target_os = "linux")]
        // SAFETY: the range lies in this allocation; the advice changes no contents, and refusal does no harm.
        unsafe {
            libc::madvise(buffer.ptr.cast(), bytes & !(HUGE - 1), libc::MADV_HUGEPAGE);
        }
        Ok(buffer)
    }

    /// Zeroed, `ALIGNMENT`-aligned; large blocks come untouched from the system, so pages cost nothing until they are used.
    pub fn zeroed(bytes: usize, argument: &str) -> Result<Self> {
        Self::with(bytes, ALIGNMENT, argument, |layout| {
            // SAFETY: `with` passes a layout of non-zero size.
            unsafe { alloc_zeroed(layout) }
        })
    }

    /// The layout asked for has malloc's own alignment, with room to align in: for a larger one the system allocator would zero by writing, and
    /// a cache of many gigabytes would be resident before its first token.
    fn with(bytes: usize, alignment: usize, argument: &str, get: impl FnOnce(Layout) -> *mut u8) -> Result<Self> {
        if bytes == 0 {
            return Ok(HostBuffer { ptr: std::ptr::null_mut(), len: 0, allocation: None });
        }
        let layout = bytes.checked_add(alignment).and_then(|n| Layout::from_size_align(n, 16).ok());
        let layout = layout.ok_or_else(|| Error::no_memory(argument, bytes))?;
        let base = get(layout);
        if base.is_null() {
            return Err(Error::no_memory(argument, bytes));
        }
        // SAFETY: less than `alignment` bytes in, which the layout has beyond `bytes`.
        let ptr = unsafe { base.add(base.addr().wrapping_neg() % alignment) };
        Ok(HostBuffer { ptr, len: bytes, allocation: Some((base, layout)) })
    }

    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        if let Some((base, layout)) = self.allocation {
            // SAFETY: allocated in `with` by this layout.
            unsafe { dealloc(base, layout) };
        }
    }
}

/// Check a workspace the caller gave against what the call needs.
pub fn check_given(data: *mut u8, size: usize, needed: usize) -> Result<()> {
    if data.is_null() {
        return Err(Error::null("workspace.data"));
    }
    if !data.addr().is_multiple_of(ALIGNMENT) {
        return Err(Error::alignment("workspace.data", format!("is {data:p}, must be {ALIGNMENT}-byte aligned")));
    }
    if size < needed {
        let message = format!("is {size} bytes, this call needs {needed} (see the _workspace_size function)");
        return Err(Error::new(Status::Workspace, "workspace.size", message));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_holds_its_least_and_never_shrinks() {
        let sizes = [0, 1, 2, 15, 16, 17, 63, 64, 65, 1000, 1 << 20, usize::MAX / 2, usize::MAX];
        for (i, &count) in sizes.iter().enumerate() {
            for (j, &piece) in sizes.iter().enumerate() {
                for (least, budget) in [(1, 64), (16, 1 << 10), (16, 0)] {
                    let bytes = windowed(count, piece, least, budget);
                    assert!(bytes >= count.min(least).saturating_mul(piece), "{count} x {piece}");
                    assert!(bytes <= count.saturating_mul(piece), "{count} x {piece}");
                    assert!(i == 0 || windowed(sizes[i - 1], piece, least, budget) <= bytes, "{count} x {piece}");
                    assert!(j == 0 || windowed(count, sizes[j - 1], least, budget) <= bytes, "{count} x {piece}");
                }
            }
        }
    }
}
