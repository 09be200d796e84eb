//! Any format id, any bytes, any lengths: decoding never panics, writes exactly the whole blocks, and agrees with itself block by block.

#![no_main]

use libfuzzer_sys::{Corpus, fuzz_target};
use pagedkv::gguf::{FORMATS, Unpacked, decode_row, format};

const UNTOUCHED: u32 = 0x7fc0_dead;

fuzz_target!(|input: &[u8]| -> Corpus {
    // The first byte chooses the format, as an id half of the time; the next two the room for results.
    let Some((&[id, low, high], row)) = input.split_first_chunk() else { return Corpus::Reject };
    let room = usize::from(u16::from_le_bytes([low, high])) % 4096;
    let Some(format) = (if id < 128 { format(i32::from(id)) } else { FORMATS.get(usize::from(id) % FORMATS.len()) })
    else {
        return Corpus::Reject;
    };

    let mut out = vec![f32::from_bits(UNTOUCHED); room];
    let written = decode_row(format, row, &mut out);
    let blocks = (row.len() / format.block_bytes).min(room / format.block_elements);
    assert_eq!(written, blocks * format.block_elements);
    assert!(out[written..].iter().all(|x| x.to_bits() == UNTOUCHED));

    let mut again = vec![0.0; room];
    (format.decode)(row, &mut again);
    assert!(same(&out[..written], &again[..written]));

    let mut unpacked = Unpacked::default();
    for (block, values) in row.chunks(format.block_bytes).zip(out[..written].chunks_exact(format.block_elements)) {
        let mut alone = vec![f32::from_bits(UNTOUCHED); format.block_elements];
        decode_row(format, block, &mut alone);
        assert!(same(values, &alone));
        if let Some(unpack) = format.unpack {
            unpack(block, &mut unpacked);
            let parts: Vec<f32> = (0..values.len()).map(|i| unpacked.value(format.sub_block, i)).collect();
            assert!(same(values, &parts));
        }
    }
    // A tail shorter than a block is ignored by everything.
    if let Some(unpack) = format.unpack {
        unpack(&row[row.len() / format.block_bytes * format.block_bytes..], &mut unpacked);
    }
    Corpus::Keep
});

fn same(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan())
}
