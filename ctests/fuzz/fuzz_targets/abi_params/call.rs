//! One kernel call: its params with the places of pointers in them, spoilt at random, given memory, run, and checked.

use super::memory::Memory;
use super::source::Source;
use super::world::{World, fill};
use pagedkv::abi::batch::pkv_batch;
use pagedkv::abi::context::pkv_context;
use pagedkv::abi::status::{PKV_ERR_INTERNAL, PKV_ERR_WORKSPACE, PKV_OK, pkv_error};
use pagedkv::abi::types::{pkv_buffer, pkv_stream, pkv_tensor};
use std::ffi::c_void;
use std::mem::offset_of;
use std::ptr::null_mut;

/// Larger claims get a NULL: the library cannot know how much memory is behind a pointer.
const MOST_BYTES: usize = 1 << 18;
const MOST_STRUCT: usize = 64 * 1024;

pub type Query = unsafe fn(*const pkv_context, *const u8, *mut usize, *mut pkv_error) -> i32;
pub type Run = unsafe fn(*const pkv_context, pkv_stream, *const u8, pkv_buffer, *mut pkv_error) -> i32;

/// Which of a tensor's rows a call may write.
#[derive(Clone, Copy, PartialEq)]
pub enum Writes {
    Nothing,
    /// All rows of the shape, from this column on.
    All,
    /// As many as the batch has new tokens, from this column on.
    Tokens(usize),
    /// As many as buffer_row_offsets ask for.
    BufferRows,
}

pub struct TensorField {
    pub name: &'static str,
    pub offset: usize,
    pub writes: Writes,
    /// May share memory with this earlier field where both look the same.
    pub alias: Option<usize>,
}

/// A `const uint32_t *` of params, `[batch_size + extra]`.
pub struct ArrayField {
    pub name: &'static str,
    pub offset: usize,
    pub extra: usize,
    pub values: Vec<u32>,
}

pub struct Call {
    pub name: &'static str,
    pub query: Query,
    pub run: Run,
    /// The params struct; pointers are filled in late.
    pub params: Image,
    pub tensors: Vec<TensorField>,
    pub arrays: Vec<ArrayField>,
    /// Offsets of handles, and of the batch where there is one.
    pub handles: Vec<usize>,
    pub batch: Option<usize>,
    /// Which caches of the layer are written (0 keys, 1 values), and where layer_idx lies in params.
    pub stores: fn(&Image) -> Vec<u32>,
    pub layer_idx: Option<usize>,
    /// Faults that a call cannot survive, put in on purpose.
    pub faults: Vec<&'static str>,
    /// Something was changed that may be a fault or not.
    pub spoilt: bool,
}

/// A C struct as bytes, 8-aligned.
#[derive(Clone)]
pub struct Image(pub Vec<u64>);

impl Image {
    pub fn of<T: Copy>(value: &T) -> Image {
        let mut words = vec![0u64; size_of::<T>() / 8];
        // SAFETY: the params structs have no padding and are whole words.
        unsafe {
            std::ptr::copy_nonoverlapping((value as *const T).cast::<u8>(), words.as_mut_ptr().cast(), size_of::<T>())
        };
        Image(words)
    }

    pub fn get<T: Copy>(&self, offset: usize) -> T {
        assert!(offset + size_of::<T>() <= self.0.len() * 8);
        // SAFETY: in bounds; used with integers and plain C structs.
        unsafe { self.0.as_ptr().cast::<u8>().add(offset).cast::<T>().read_unaligned() }
    }

    pub fn set<T: Copy>(&mut self, offset: usize, value: T) {
        assert!(offset + size_of::<T>() <= self.0.len() * 8);
        // SAFETY: in bounds.
        unsafe { self.0.as_mut_ptr().cast::<u8>().add(offset).cast::<T>().write_unaligned(value) };
    }

    /// Changes a random word that is no pointer and not struct_size.
    pub fn spoil(&mut self, source: &mut Source<'_>, pointers: &[usize]) {
        let words = self.0.len() * 2;
        let is_pointer = |offset: usize| offset < 8 || pointers.contains(&(offset & !7));
        let offset = (2 + source.below(words - 2)) * 4;
        if is_pointer(offset) {
            return;
        }
        if offset.is_multiple_of(8) && source.below(2) == 1 {
            let value = source.awkward(self.get::<u64>(offset));
            self.set(offset, value);
        } else {
            let value = source.awkward(u64::from(self.get::<u32>(offset)));
            self.set(offset, value as u32);
        }
    }

    /// Memory for the struct as a caller with this struct_size would have it.
    pub fn place(&self, name: &str, memory: &mut Memory, source: &mut Source<'_>, spoil_size: bool) -> *mut u8 {
        let ours = self.0.len() * 8;
        let size = match if spoil_size { source.within(1, 9) } else { 0 } {
            0 => ours,
            1 => 0,
            2 => 8,
            3 => ours - 8,
            4 => ours - 1,
            5 | 6 => ours + 8,
            7 => MOST_STRUCT,
            8 => MOST_STRUCT + 1,
            _ => usize::MAX,
        };
        let dirty = source.below(2) == 1;
        let len = if size > MOST_STRUCT { 8 } else { size.max(8) };
        memory.alloc(name, len, 0, |bytes| {
            let n = len.min(ours);
            // SAFETY: the image has `ours` bytes.
            bytes[..n].copy_from_slice(unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast::<u8>(), n) });
            bytes[..8].copy_from_slice(&size.to_ne_bytes());
            if dirty && spoil_size && len > ours {
                bytes[len - 1] = 1;
            }
        })
    }
}

/// Bytes that a tensor spans; `None` where the description makes no sense, which the library must see.
fn extent(t: &pkv_tensor) -> Option<usize> {
    let size = super::world::dtype_size(t.dtype)?;
    let ndim = usize::try_from(t.ndim).ok().filter(|n| (1..=4).contains(n))?;
    let (shape, stride) = (&t.shape[..ndim], strides(t, ndim)?);
    if shape.iter().chain(&stride).any(|&n| n < 0) {
        return None;
    }
    if shape.contains(&0) {
        return Some(0);
    }
    let mut span = 1i128;
    for (&n, &s) in shape.iter().zip(&stride) {
        span += i128::from(n - 1) * i128::from(s);
    }
    usize::try_from(span * size as i128).ok().or(Some(usize::MAX))
}

fn strides(t: &pkv_tensor, ndim: usize) -> Option<Vec<i64>> {
    if t.stride[..ndim].iter().any(|&s| s != 0) {
        return Some(t.stride[..ndim].to_vec());
    }
    let mut stride = vec![1i64; ndim];
    for d in (0..ndim.saturating_sub(1)).rev() {
        // What overflows here is too large for us and for the library.
        stride[d] = stride[d + 1].saturating_mul(t.shape[d + 1].max(1));
    }
    Some(stride)
}

/// A pkv_error as callers have it: exact, absent, of size 0, or from a later version.
pub struct ErrorSlot {
    memory: Memory,
    pub ptr: *mut pkv_error,
    size: usize,
}

impl ErrorSlot {
    pub fn new(source: &mut Source<'_>) -> Self {
        let ours = size_of::<pkv_error>();
        let (size, len) = match source.below(8) {
            1 => (0, 0),
            2 => (0, ours),
            3 => (ours + 64, ours + 64),
            _ => (ours, ours),
        };
        let mut memory = Memory::default();
        let ptr = if len == 0 {
            null_mut()
        } else {
            memory.alloc("error", len, 0, |bytes| {
                bytes.fill(0xaa);
                bytes[..8].copy_from_slice(&size.to_ne_bytes());
            })
        };
        memory.remember();
        ErrorSlot { memory, ptr: ptr.cast(), size }
    }

    /// After a call: filled on failure, cleared on success, left alone where the caller did not say its size.
    pub fn check(&mut self, status: i32, what: &str) {
        if self.ptr.is_null() || self.size == 0 {
            self.memory.assert_unchanged(what);
            assert_ne!(status, PKV_ERR_INTERNAL, "{what}: a panic inside");
            return;
        }
        // SAFETY: at least a pkv_error, all of it initialised.
        let error = unsafe { &*self.ptr };
        assert_eq!(error.struct_size, self.size, "{what}");
        assert_eq!(error.status, status, "{what}");
        let text = |chars: &[std::ffi::c_char]| {
            let end = chars.iter().position(|&c| c == 0).unwrap_or_else(|| panic!("{what}: error text without an end"));
            String::from_utf8(chars[..end].iter().map(|&c| c as u8).collect()).expect("error text is UTF-8")
        };
        let (argument, message) = (text(&error.argument), text(&error.message));
        assert_ne!(status, PKV_ERR_INTERNAL, "{what}: {argument}: {message}");
        if status == PKV_OK {
            assert!(argument.is_empty() && message.is_empty(), "{what}: not cleared: {argument}: {message}");
        } else {
            assert!(
                !argument.is_empty() && !message.is_empty(),
                "{what}: status {status} without argument or message: {argument}: {message}"
            );
        }
        self.memory.allow(self.ptr.cast(), 8..size_of::<pkv_error>());
        self.memory.assert_only_allowed_changed(what);
    }

    pub fn message(&self) -> String {
        if self.ptr.is_null() || self.size == 0 {
            return String::from("(no error struct)");
        }
        // SAFETY: at least a pkv_error, with an end in both texts after `check`.
        unsafe {
            let text = |p: *const std::ffi::c_char| std::ffi::CStr::from_ptr(p).to_string_lossy().into_owned();
            format!("{}: {}", text(&raw const (*self.ptr).argument as _), text(&raw const (*self.ptr).message as _))
        }
    }
}

impl Call {
    fn pointers(&self) -> Vec<usize> {
        let data = self.tensors.iter().map(|t| t.offset + offset_of!(pkv_tensor, data));
        data.chain(self.arrays.iter().map(|a| a.offset)).chain(self.handles.iter().copied()).chain(self.batch).collect()
    }

    /// A quarter of the calls stay as they were made.
    fn spoil(&mut self, source: &mut Source<'_>, world: &mut World) {
        for _ in 0..[0, 0, 1, 1, 1, 1, 2, 3][source.below(8)] {
            self.spoilt = true;
            match source.below(8) {
                0 | 1 if self.batch.is_some() => world.spoil_batch(source),
                2 if !self.arrays.is_empty() => {
                    let array = source.below(self.arrays.len());
                    spoil_array(&mut self.arrays[array].values, source);
                }
                3..=5 => {
                    let field = source.below(self.tensors.len());
                    self.spoil_tensor(self.tensors[field].offset, source);
                }
                _ => self.params.spoil(source, &self.pointers()),
            }
        }
    }

    /// Changes a tensor's description by a little: what a kernel would run past.
    fn spoil_tensor(&mut self, offset: usize, source: &mut Source<'_>) {
        let mut t: pkv_tensor = self.params.get(offset);
        if t.dtype == 0 {
            return;
        }
        let ndim = t.ndim as usize % 5;
        let d = source.below(ndim.max(1));
        match source.below(8) {
            0 | 1 => t.shape[d] -= 1,
            2 => t.shape[d] += 1,
            3 => t.dtype = 1 + source.below(11) as i32,
            4 => t.ndim += source.pick(&[1, -1]),
            _ => {
                if let Some(stride) = strides(&t, ndim) {
                    t.stride[..ndim].copy_from_slice(&stride);
                    t.stride[d] += source.pick(&[-1, 1, -2, -t.stride[d]]);
                }
            }
        }
        self.params.set(offset, t);
    }

    pub fn go(mut self, source: &mut Source<'_>, mut world: World) {
        self.spoil(source, &mut world);
        let described = self.spoilt;
        let mut faults = std::mem::take(&mut self.faults);
        let mut put_fault = |source: &mut Source<'_>, what: &'static str| {
            let put = source.once_in(64);
            if put {
                faults.push(what);
            }
            put
        };
        let wild = source.below(3) == 1;

        let mut placed: Vec<(pkv_tensor, *mut u8)> = Vec::new();
        let mut shared: Vec<usize> = Vec::new();
        for field in &self.tensors {
            let t: pkv_tensor = self.params.get(field.offset);
            let mut data = null_mut();
            let span = extent(&t);
            // Without elements there is nothing to point to, and a spoilt description may be one that is not looked at.
            let matters = !described && span.is_some_and(|n| n > 0);
            if t.dtype != 0 && !(matters && put_fault(source, "a tensor without data")) {
                let len = span.unwrap_or(16);
                let alias = field.alias.map(|i| placed[i]).filter(|(other, _)| {
                    (other.dtype, other.ndim, other.shape, other.stride) == (t.dtype, t.ndim, t.shape, t.stride)
                        && source.below(2) == 1
                });
                let wide = super::world::dtype_size(t.dtype).is_some_and(|size| size > 1);
                let shift = usize::from(alias.is_none() && matters && wide && put_fault(source, "a misaligned tensor"));
                if alias.is_some_and(|(_, other)| !other.is_null()) && len > 0 {
                    shared.push(placed.len());
                }
                data = match alias {
                    Some((_, other)) => other,
                    None if len > MOST_BYTES => null_mut(),
                    None => world
                        .memory
                        .alloc(field.name, len, shift, |bytes| fill(&mut source.random, t.dtype, bytes, wild)),
                };
            }
            self.params.set(field.offset, data);
            placed.push((t, data));
        }
        let batch_size = world.batch.get::<u32>(offset_of!(pkv_batch, batch_size)) as usize;
        for array in &self.arrays {
            let optional = array.extra == 0;
            let missing = if optional {
                array.values.is_empty()
            } else {
                !described && batch_size > 0 && put_fault(source, "no row offsets")
            };
            let data = if missing {
                null_mut()
            } else {
                place_array(&mut world.memory, array.name, &array.values, batch_size + array.extra)
            };
            self.params.set(array.offset, data);
        }
        for &handle in &self.handles {
            if put_fault(source, "a NULL handle") {
                self.params.set(handle, 0u64);
            }
        }
        if let Some(offset) = self.batch {
            let image = world.placed_batch();
            let batch = if put_fault(source, "no batch") {
                null_mut()
            } else {
                let spoil_size = source.once_in(64);
                self.spoilt |= spoil_size;
                image.place("batch", &mut world.memory, source, spoil_size)
            };
            self.params.set(offset, batch);
        }
        let spoil_size = source.once_in(64);
        self.spoilt |= spoil_size;
        let params = self.params.place("params", &mut world.memory, source, spoil_size);
        let ctx = if put_fault(source, "no context") { null_mut() } else { world.ctx };
        let params = if put_fault(source, "no params") { null_mut() } else { params };
        let stream = pkv_stream { native: if put_fault(source, "a stream") { 64 as *mut c_void } else { null_mut() } };
        // The faults that a query sees, which looks at neither stream nor addresses.
        let of_handles = ["a NULL handle", "a foreign handle", "no batch", "no context", "no params"];
        let query_faults = faults.iter().any(|fault| of_handles.contains(fault));

        world.memory.remember();
        let query_what = format!("{}_workspace_size", self.name);
        let mut bytes = usize::MAX;
        let mut error = ErrorSlot::new(source);
        // SAFETY: every pointer is NULL or memory of its claimed extent.
        let query = unsafe { (self.query)(ctx, params, &mut bytes, error.ptr) };
        error.check(query, &query_what);
        world.memory.assert_unchanged(&query_what);
        assert!(query == PKV_OK || bytes == usize::MAX, "{query_what} refused, and wrote");
        if query_faults {
            assert_ne!(query, PKV_OK, "{query_what} accepts {faults:?}");
        } else if !self.spoilt {
            assert_eq!(query, PKV_OK, "{query_what} refuses a good call: {}", error.message());
        }

        // A workspace is nobody's output: what lies in it afterwards is not looked at, only that a refused call leaves it alone.
        let want = if query == PKV_OK && bytes <= 1 << 24 { bytes } else { 0 };
        let mut fault = |what| {
            faults.push(what);
            what
        };
        let (size, shift, _) = match source.below(8) {
            0..=2 => (0, 0, "none"),
            3 if want > 0 => (want - 1, 0, fault("a workspace that is too small")),
            4 => (want + 256, 8, fault("a misaligned workspace")),
            5 => (want + 300, 0, "large"),
            _ => (want, 0, "exact"),
        };
        let workspace = |memory: &mut Memory, size: usize, shift: usize| {
            let data =
                if size == 0 { null_mut() } else { memory.alloc("workspace", size, shift, |bytes| bytes.fill(0x5a)) };
            pkv_buffer { data: data.cast(), size }
        };
        let call = |world: &mut World, given: pkv_buffer, source: &mut Source<'_>| {
            world.memory.remember();
            let mut error = ErrorSlot::new(source);
            // SAFETY: as above; the workspace is as large as it says.
            let status = unsafe { (self.run)(ctx, stream, params, given, error.ptr) };
            error.check(status, self.name);
            if status != PKV_OK {
                world.memory.assert_unchanged(&format!("{}, refused ({})", self.name, error.message()));
            } else {
                world.memory.forbid_all();
                if !given.data.is_null() {
                    world.memory.allow(given.data.cast(), 0..given.size);
                }
                allow(&self.params, &self.tensors, &placed, self.stores, self.layer_idx, world, &self.arrays);
                world.memory.assert_only_allowed_changed(self.name);
                assert_eq!(query, PKV_OK, "{} runs what its query refuses", self.name);
            }
            if faults.is_empty() {
                assert!(self.spoilt || status == PKV_OK, "{} refuses a good call: {}", self.name, error.message());
            } else {
                assert_ne!(status, PKV_OK, "{} accepts {faults:?}", self.name);
            }
            status
        };
        let given = workspace(&mut world.memory, size, shift);
        let status = call(&mut world, given, source);
        if faults == ["a workspace that is too small"] && !self.spoilt {
            assert_eq!(status, PKV_ERR_WORKSPACE, "{}", self.name);
        }
        if status == PKV_OK {
            // The same call in another workspace gives the same bits.
            let first = world.memory.contents();
            world.memory.restore();
            let given = workspace(&mut world.memory, if size == 0 { want } else { 0 }, 0);
            let again = call(&mut world, given, source);
            assert_eq!(again, PKV_OK);
            world.memory.assert_same(&first, "workspace", self.name);

            // An output in an input's memory is what it is in memory of its own.
            if !shared.is_empty() && !self.spoilt {
                world.memory.restore();
                for &i in &shared {
                    let (field, (t, input)) = (&self.tensors[i], placed[i]);
                    let own = world.memory.copy("output of its own", input);
                    // SAFETY: the params placed above, whole because nothing is spoilt.
                    unsafe { params.add(field.offset + offset_of!(pkv_tensor, data)).cast::<*mut u8>().write(own) };
                    placed[i] = (t, own);
                }
                world.memory.remember();
                let mut error = ErrorSlot::new(source);
                // SAFETY: as above.
                let status =
                    unsafe { (self.run)(ctx, stream, params, pkv_buffer { data: null_mut(), size: 0 }, error.ptr) };
                error.check(status, self.name);
                assert_eq!(status, PKV_OK);
                for &i in &shared {
                    let (input, own) = (self.tensors[i].alias.map(|at| placed[at].1), placed[i].1);
                    let in_place =
                        first.get(world.memory.index_of(input.expect("it shared one"))).expect("placed before");
                    assert!(
                        world.memory.bytes(own) == in_place,
                        "{}: {} in place differs",
                        self.name,
                        self.tensors[i].name
                    );
                }
            }
        }
    }
}

/// Allows what a successful call writes.
fn allow(
    params: &Image,
    tensors: &[TensorField],
    placed: &[(pkv_tensor, *mut u8)],
    stores: fn(&Image) -> Vec<u32>,
    layer_idx: Option<usize>,
    world: &mut World,
    arrays: &[ArrayField],
) {
    let batch_size = world.batch.get::<u32>(offset_of!(pkv_batch, batch_size)) as usize;
    let last = |offsets: &[u32]| if batch_size == 0 { 0 } else { element(offsets, batch_size) as usize };
    for (field, (t, data)) in tensors.iter().zip(placed) {
        let (rows, from) = match field.writes {
            Writes::Nothing => continue,
            Writes::All => (usize::MAX, 0),
            Writes::Tokens(from) => (last(&world.row_offsets), from),
            Writes::BufferRows => (last(&arrays[0].values), 0),
        };
        let ndim = t.ndim as usize;
        if data.is_null() || t.dtype == 0 || t.shape[..ndim].contains(&0) {
            continue;
        }
        let size = super::world::dtype_size(t.dtype).expect("a call with it succeeded");
        let stride = strides(t, ndim).expect("a call with it succeeded");
        let rows = rows.min(t.shape[0] as usize);
        let mut written = vec![false; extent(t).expect("a call with it succeeded") / size];
        let outer: Vec<usize> = std::iter::once(rows).chain(t.shape[1..ndim - 1].iter().map(|&n| n as usize)).collect();
        for i in 0..outer.iter().product() {
            let (mut rest, mut at) = (i, 0);
            for (d, &n) in outer.iter().enumerate().rev() {
                at += rest % n * stride[d] as usize;
                rest /= n;
            }
            for element in &mut written[at + from..at + t.shape[ndim - 1] as usize] {
                assert!(!std::mem::replace(element, true), "{} overlaps itself, and is taken: {t:?}", field.name);
            }
            world.memory.allow(*data, (at + from) * size..(at + t.shape[ndim - 1] as usize) * size);
        }
    }
    if let Some(offset) = layer_idx {
        for kv in stores(params) {
            world.allow_new_rows(kv as usize, params.get::<u32>(offset) as usize);
        }
    }
}

pub fn spoil_array(values: &mut [u32], source: &mut Source<'_>) {
    if !values.is_empty() {
        let i = source.below(values.len());
        values[i] = source.awkward(u64::from(values[i])) as u32;
    }
}

/// `len` elements, the last value repeated past those there are; NULL where that is too much.
pub fn place_array(memory: &mut Memory, name: &str, values: &[u32], len: usize) -> *mut u8 {
    if len * 4 > MOST_BYTES {
        return null_mut();
    }
    memory.alloc(name, len * 4, 0, |bytes| {
        for (i, to) in bytes.chunks_exact_mut(4).enumerate() {
            to.copy_from_slice(&element(values, i).to_ne_bytes());
        }
    })
}

/// What `place_array` puts at `i`.
pub fn element(values: &[u32], i: usize) -> u32 {
    values.get(i).or(values.last()).copied().unwrap_or(0)
}
