//! The exports that are not kernels: contexts, collections, weights, names.

use super::call::{ErrorSlot, Image};
use super::memory::Memory;
use super::source::Source;
use super::world::{DEFAULTS, context, dtype_size, serially};
use pagedkv::abi::collection::*;
use pagedkv::abi::context::*;
use pagedkv::abi::status::{PKV_OK, pkv_status_name};
use pagedkv::abi::types::*;
use pagedkv::abi::version::*;
use pagedkv::abi::weight::*;
use pagedkv::gguf::FORMATS;
use std::ffi::{CStr, c_char, c_void};
use std::mem::offset_of;
use std::ptr::null_mut;

/// A struct with some words spoilt, except the pointers among them.
fn spoil(source: &mut Source<'_>, image: &mut Image, pointers: &[usize]) -> bool {
    let n = [0, 0, 1, 1, 2, 3][source.below(6)];
    (0..n).for_each(|_| image.spoil(source, pointers));
    n > 0
}

unsafe extern "C" fn log(_: *mut c_void, level: i32, target: *const c_char, message: *const c_char) {
    assert!((1..=4).contains(&level));
    // SAFETY: the header promises two strings.
    unsafe {
        assert!(!CStr::from_ptr(target).is_empty());
        let _ = CStr::from_ptr(message);
    }
}

pub fn contexts(source: &mut Source<'_>) {
    let options = pkv_context_options {
        log_level: source.below(5) as i32,
        log: if source.below(2) == 1 { Some(log) } else { None },
        parallel_for: if source.below(2) == 1 { Some(serially) } else { None },
        ..DEFAULTS
    };
    let mut image = Image::of(&options);
    let pointers = [
        offset_of!(pkv_context_options, log),
        offset_of!(pkv_context_options, log_user),
        offset_of!(pkv_context_options, parallel_for),
        offset_of!(pkv_context_options, parallel_user),
    ];
    let spoilt = spoil(source, &mut image, &pointers);
    // More would ask for as many threads, and get them.
    let threads = offset_of!(pkv_context_options, num_threads);
    image.set(threads, image.get::<u32>(threads) % 5);
    let mut memory = Memory::default();
    let spoil_size = source.once_in(8);
    let placed = image.place("options", &mut memory, source, spoil_size);
    memory.remember();
    let mut ctx = std::ptr::dangling_mut::<pkv_context>();
    let mut error = ErrorSlot::new(source);
    // SAFETY: options of their claimed size, a place for the handle.
    unsafe {
        let status = pkv_context_create(placed.cast(), &mut ctx, error.ptr);
        error.check(status, "pkv_context_create");
        memory.assert_unchanged("pkv_context_create");
        assert!(status == PKV_OK || spoilt || spoil_size, "a good context is refused: {}", error.message());
        if status == PKV_OK {
            assert!(pkv_context_num_threads(ctx) >= 1);
            pkv_context_destroy(ctx);
        } else {
            assert_eq!(ctx, std::ptr::dangling_mut(), "pkv_context_create refused, and wrote");
        }
        let mut error = ErrorSlot::new(source);
        error.check(pkv_context_create(placed.cast(), null_mut(), error.ptr), "pkv_context_create without out");
        pkv_context_destroy(null_mut());
    }
}

pub fn collections(source: &mut Source<'_>) {
    let fp8 = source.below(2) == 1;
    let scale_dtype = if fp8 { source.pick(&[0, PKV_F32, PKV_BF16, PKV_F8_E8M0]) } else { 0 };
    let options = pkv_collection_options {
        struct_size: size_of::<pkv_collection_options>(),
        dtype: if fp8 { source.pick(&[PKV_F8_E4M3, PKV_F8_E5M2]) } else { source.pick(&[PKV_F32, PKV_F16, PKV_BF16]) },
        scale_dtype,
        num_blocks: source.within(1, 5) as u32,
        num_layers: source.within(1, 3) as u32,
        page_size: source.within(1, 5) as u32,
        num_heads: source.within(1, 3) as u32,
        head_size: source.within(1, 40) as u32,
        is_mla: source.below(2) as u32,
        quantization_granularity: if scale_dtype == 0 { 0 } else { source.below(45) as u32 },
        reserved: 0,
        blocks: pkv_buffer { data: null_mut(), size: 0 },
        scales: pkv_buffer { data: null_mut(), size: 0 },
    };
    let mut image = Image::of(&options);
    const BLOCKS: usize = offset_of!(pkv_collection_options, blocks);
    const SCALES: usize = offset_of!(pkv_collection_options, scales);
    let spoilt = spoil(source, &mut image, &[BLOCKS, BLOCKS + 8, SCALES, SCALES + 8]);
    let mut memory = Memory::default();
    let ctx = context(source.below(3));
    // SAFETY: options of their claimed size; buffers as large as they say; places for results; handles of ours.
    unsafe {
        let (mut blocks, mut scales) = (usize::MAX, usize::MAX);
        let spoil_size = source.once_in(16);
        let placed = image.place("options", &mut memory, source, spoil_size);
        let mut error = ErrorSlot::new(source);
        let status = pkv_collection_storage_size(placed.cast(), &mut blocks, &mut scales, error.ptr);
        error.check(status, "pkv_collection_storage_size");
        assert!(status == PKV_OK || spoilt || spoil_size, "good options are refused: {}", error.message());
        assert!(
            status == PKV_OK || (blocks, scales) == (usize::MAX, usize::MAX),
            "pkv_collection_storage_size refused, and wrote"
        );

        // Storage: the library's where it is small; else ours, of the right size, too small, or misaligned.
        let small = status == PKV_OK && blocks.saturating_add(scales) <= 1 << 20;
        let choice = if small { source.below(5) } else { 3 };
        let mut ours = [pkv_buffer { data: null_mut(), size: 0 }; 2];
        if choice > 0 {
            for ((buffer, want), at) in ours.iter_mut().zip([blocks, scales]).zip([BLOCKS, SCALES]) {
                let size = if !small {
                    64
                } else if choice == 3 {
                    want.saturating_sub(1)
                } else {
                    want
                };
                if size > 0 {
                    *buffer = pkv_buffer {
                        data: memory.alloc("storage", size, usize::from(choice == 4), |_| ()).cast(),
                        size,
                    };
                }
                image.set(at, *buffer);
            }
        }
        let placed = image.place("options", &mut memory, source, spoil_size);
        memory.remember();
        let mut collection = std::ptr::dangling_mut::<pkv_collection>();
        let mut error = ErrorSlot::new(source);
        let made = pkv_collection_create(ctx, placed.cast(), &mut collection, error.ptr);
        error.check(made, "pkv_collection_create");
        memory.assert_unchanged("pkv_collection_create");
        if made != PKV_OK {
            assert_eq!(collection, std::ptr::dangling_mut(), "pkv_collection_create refused, and wrote");
            assert!(spoilt || spoil_size || choice >= 3, "a good collection is refused: {}", error.message());
            return;
        }
        assert_eq!(status, PKV_OK);
        assert_ne!(choice, 3, "storage that is too small is taken");

        let mut info = pkv_collection_options { struct_size: size_of::<pkv_collection_options>(), ..options };
        let mut error = ErrorSlot::new(source);
        error.check(pkv_collection_info(collection, &mut info, error.ptr), "pkv_collection_info");
        for word in 2..12 {
            assert_eq!(
                Image::of(&info).get::<u32>(word * 4),
                image.get::<u32>(word * 4),
                "info differs in word {word}"
            );
        }
        assert_eq!((info.blocks.size, info.scales.size), (blocks, scales));
        assert!(choice == 0 || info.blocks.data == ours[0].data);

        for view_of in [pkv_collection_key_cache, pkv_collection_value_cache] {
            let layer =
                if source.below(2) == 0 { source.below(info.num_layers as usize) as u64 } else { source.awkward(0) }
                    as u32;
            let mut view = std::mem::MaybeUninit::<pkv_cache_view>::zeroed();
            let mut error = ErrorSlot::new(source);
            let status = view_of(collection, layer, view.as_mut_ptr(), error.ptr);
            error.check(status, "pkv_collection_key_cache or value_cache");
            if status == PKV_OK {
                let view = view.assume_init();
                assert!(layer < info.num_layers);
                inside(&view.blocks, info.blocks);
                inside(&view.scales, info.scales);
            }
        }
        pkv_collection_destroy(collection);
        pkv_collection_destroy(null_mut());
    }
}

/// A view spans memory of its buffer only, and all of it can be read.
fn inside(t: &pkv_tensor, buffer: pkv_buffer) {
    if t.data.is_null() {
        assert_eq!((t.dtype, buffer.size), (0, 0));
        return;
    }
    let size = dtype_size(t.dtype).expect("a dtype of ours");
    let last: i64 = t.shape.iter().zip(&t.stride).map(|(n, s)| (n - 1) * s).sum();
    let start = t.data as usize - buffer.data as usize;
    assert!(start + (last as usize + 1) * size <= buffer.size);
    // SAFETY: inside the buffer, as just seen.
    unsafe { t.data.cast::<u8>().add(last as usize * size).read() };
}

pub fn weights(source: &mut Source<'_>) {
    let format = &FORMATS[source.below(FORMATS.len())];
    let (rows, cols) = (source.within(1, 9), format.block_elements * source.within(1, 3));
    let row_bytes = format.row_bytes(cols).expect("whole blocks");
    let stride = row_bytes + source.pick(&[0, 0, 1, 16]);
    let size = (rows - 1) * stride + row_bytes;
    let short = source.once_in(4);
    let mut memory = Memory::default();
    let size = size - usize::from(short);
    let random = &mut source.random;
    let data = memory.alloc("data", size, 0, |bytes| random.fill(bytes));
    let options = pkv_gguf_weight_options {
        struct_size: size_of::<pkv_gguf_weight_options>(),
        data: data.cast(),
        data_size: size,
        rows: rows as i64,
        cols: cols as i64,
        row_bytes: if stride == row_bytes { 0 } else { stride as i64 },
        encoding: format.id,
        flags: source.below(2) as u32,
    };
    let mut image = Image::of(&options);
    let (data_at, size_at) =
        (offset_of!(pkv_gguf_weight_options, data), offset_of!(pkv_gguf_weight_options, data_size));
    let spoilt = spoil(source, &mut image, &[data_at, size_at]);
    let (absent, spoil_size) = (source.once_in(16), source.once_in(16));
    if absent {
        image.set(data_at, 0u64);
    }
    let placed = image.place("options", &mut memory, source, spoil_size);
    memory.remember();
    let mut weight = std::ptr::dangling_mut::<pkv_gguf_weight>();
    let mut error = ErrorSlot::new(source);
    // SAFETY: options of their claimed size, data as long as data_size, a place for the handle.
    unsafe {
        let status = pkv_gguf_weight_create(context(source.below(3)), placed.cast(), &mut weight, error.ptr);
        error.check(status, "pkv_gguf_weight_create");
        memory.assert_unchanged("pkv_gguf_weight_create");
        assert!(!absent || status != PKV_OK);
        assert!(!short || spoilt || status != PKV_OK, "data that is too short is taken");
        if status == PKV_OK {
            pkv_gguf_weight_destroy(weight);
        } else {
            assert_eq!(weight, std::ptr::dangling_mut(), "pkv_gguf_weight_create refused, and wrote");
            assert!(spoilt || short || absent || spoil_size, "a good weight is refused: {}", error.message());
        }
        pkv_gguf_weight_destroy(null_mut());
    }
}

pub fn names(source: &mut Source<'_>) {
    let start = source.byte();
    let number = source.awkward(u64::from(start)) as i32;
    // SAFETY: NULL or places for results; the strings are static.
    unsafe {
        assert!(!CStr::from_ptr(pkv_status_name(number)).is_empty());
        assert!(!CStr::from_ptr(pkv_version()).is_empty() && !CStr::from_ptr(pkv_build_info()).is_empty());
        let (mut name, mut elements, mut bytes) = (std::ptr::null(), 0, 0);
        let status = pkv_gguf_encoding_info(number, &mut name, &mut elements, &mut bytes);
        match pagedkv::gguf::format(number) {
            Some(format) => {
                assert_eq!(
                    (status, elements as usize, bytes as usize),
                    (PKV_OK, format.block_elements, format.block_bytes)
                );
                assert_eq!(CStr::from_ptr(name).to_str(), Ok(format.name));
            }
            None => assert!(status != PKV_OK && name.is_null() && (elements, bytes) == (0, 0)),
        }
        assert_eq!(pkv_gguf_encoding_info(number, null_mut(), null_mut(), null_mut()), status);
    }
}
