//! The caller's memory of one call: every array and tensor in an allocation of exactly its extent, so that AddressSanitizer sees one byte too far, with
//! a copy from before the call and a map of the bytes the call may write.

use std::alloc::{Layout, alloc, dealloc};
use std::ops::Range;

struct Piece {
    name: String,
    base: *mut u8,
    layout: Layout,
    /// Bytes from `base` to the data: a pointer can be made to point off its alignment.
    shift: usize,
    len: usize,
    before: Vec<u8>,
    writable: Vec<Range<usize>>,
}

#[derive(Default)]
pub struct Memory(Vec<Piece>);

impl Memory {
    /// `len` bytes aligned to 256 and then moved by `shift`. Zero bytes get an address that must not be touched.
    pub fn alloc(
        &mut self,
        name: impl Into<String>,
        len: usize,
        shift: usize,
        fill: impl FnOnce(&mut [u8]),
    ) -> *mut u8 {
        let size = shift + len;
        let layout = Layout::from_size_align(size.max(1), 256).expect("small");
        // SAFETY: the size is not 0; the slice is the allocation's tail, written before it is read.
        unsafe {
            let base = alloc(layout);
            assert!(!base.is_null());
            let data = base.add(shift);
            data.write_bytes(0, len);
            fill(std::slice::from_raw_parts_mut(data, len));
            self.0.push(Piece {
                name: name.into(),
                base,
                layout,
                shift,
                len,
                before: Vec::new(),
                writable: Vec::new(),
            });
            // With nothing to hold, the address is past the allocation's one byte.
            if size == 0 { base.add(1) } else { data }
        }
    }

    /// The call may write this range of the piece that starts at `data`.
    pub fn allow(&mut self, data: *const u8, range: Range<usize>) {
        let piece = self.index_of(data);
        self.0[piece].writable.push(range);
    }

    /// A piece of its own with the same bytes as the piece that starts at `data`.
    pub fn copy(&mut self, name: &str, data: *const u8) -> *mut u8 {
        let bytes = self.bytes(data).to_vec();
        self.alloc(name, bytes.len(), 0, |to| to.copy_from_slice(&bytes))
    }

    pub fn bytes(&self, data: *const u8) -> &[u8] {
        self.0[self.index_of(data)].now()
    }

    pub fn index_of(&self, data: *const u8) -> usize {
        self.0.iter().position(|p| std::ptr::eq(p.base.wrapping_add(p.shift), data)).expect("memory of ours")
    }

    pub fn forbid_all(&mut self) {
        self.0.iter_mut().for_each(|p| p.writable.clear());
    }

    pub fn remember(&mut self) {
        for p in &mut self.0 {
            p.before = p.now().to_vec();
        }
    }

    pub fn restore(&mut self) {
        for p in &mut self.0 {
            // SAFETY: the piece's own memory, of the length remembered.
            unsafe { std::ptr::copy_nonoverlapping(p.before.as_ptr(), p.base.add(p.shift), p.len) };
        }
    }

    pub fn contents(&self) -> Vec<Vec<u8>> {
        self.0.iter().map(|p| p.now().to_vec()).collect()
    }

    pub fn assert_unchanged(&self, what: &str) {
        for p in &self.0 {
            let first = first_difference(p.now(), &p.before);
            assert!(first.is_none(), "{what} changed byte {} of {} ({} bytes)", first.unwrap_or(0), p.name, p.len);
        }
    }

    /// Only ranges that were allowed have changed.
    pub fn assert_only_allowed_changed(&mut self, what: &str) {
        for p in &mut self.0 {
            let mut may = p.before.clone();
            for range in &p.writable {
                may[range.clone()].copy_from_slice(&p.now()[range.clone()]);
            }
            let first = first_difference(p.now(), &may);
            assert!(first.is_none(), "{what} changed byte {} of {} ({} bytes)", first.unwrap_or(0), p.name, p.len);
        }
    }

    /// Equal in everything but the pieces called `except`.
    pub fn assert_same(&self, contents: &[Vec<u8>], except: &str, what: &str) {
        for (p, want) in self.0.iter().zip(contents).filter(|(p, _)| p.name != except) {
            let first = first_difference(p.now(), want);
            assert!(first.is_none(), "{what}: byte {} of {} differs", first.unwrap_or(0), p.name);
        }
    }
}

/// Whole slices first: the fuzzer looks at every comparison of a loop.
fn first_difference(a: &[u8], b: &[u8]) -> Option<usize> {
    if a == b { None } else { a.iter().zip(b).position(|(a, b)| a != b) }
}

impl Piece {
    fn now(&self) -> &[u8] {
        // SAFETY: the piece's own memory; nobody writes it between calls.
        unsafe { std::slice::from_raw_parts(self.base.add(self.shift), self.len) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        for p in &self.0 {
            // SAFETY: allocated in `alloc` by this layout.
            unsafe { dealloc(p.base, p.layout) };
        }
    }
}
