//! Every row of the format table against the public `gguf` package, bit for bit (`ctests/golden/make_gguf_golden.py`).

#[path = "support/gguf_random.rs"]
mod gguf_random;

use gguf_random::{Random, random_rows};
use pagedkv::gguf::{FORMATS, decode_row};
use safetensors::{Dtype, SafeTensors};

const GOLDEN: &[u8] = include_bytes!("../golden/gguf.safetensors");

/// Bits of a value, one pattern for all NaNs.
fn bits(x: f32) -> u32 {
    if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }
}

#[test]
fn every_format_decodes_as_the_gguf_package_does() {
    let golden = SafeTensors::deserialize(GOLDEN).unwrap();
    assert_eq!(golden.len(), 2 * FORMATS.len(), "golden vectors of formats that the table lacks");
    for format in FORMATS {
        let tensor = |part| {
            let name = format!("{}.{part}", format.name);
            golden.tensor(&name).unwrap_or_else(|e| panic!("no golden vectors {name}: {e}"))
        };
        let (blocks, values) = (tensor("blocks"), tensor("values"));
        let count = blocks.shape()[0];
        assert!(count >= 8, "{}", format.name);
        assert_eq!((blocks.dtype(), blocks.shape()), (Dtype::U8, &[count, format.block_bytes][..]), "{}", format.name);
        assert_eq!(
            (values.dtype(), values.shape()),
            (Dtype::F32, &[count, format.block_elements][..]),
            "{}",
            format.name
        );

        let mut out = vec![f32::from_bits(0x7fc0_dead); count * format.block_elements];
        assert_eq!(decode_row(format, blocks.data(), &mut out), out.len(), "{}", format.name);
        for (i, (&got, want)) in out.iter().zip(values.data().as_chunks().0).enumerate() {
            let want = f32::from_le_bytes(*want);
            let (block, element) = (i / format.block_elements, i % format.block_elements);
            assert_eq!(bits(got), bits(want), "{} block {block} element {element}: {got:e}, not {want:e}", format.name);
        }
    }
}

#[test]
fn taken_apart_blocks_give_the_decoded_values() {
    let golden = SafeTensors::deserialize(GOLDEN).unwrap();
    for format in FORMATS {
        let Some(unpack) = format.unpack else {
            assert_eq!((format.block_elements, format.activation_block), (1, 0), "{}", format.name);
            continue;
        };
        let blocks = golden.tensor(&format!("{}.blocks", format.name)).unwrap();
        let mut unpacked = Default::default();
        let mut out = vec![0.0; format.block_elements];
        for block in blocks.data().chunks_exact(format.block_bytes) {
            unpack(block, &mut unpacked);
            decode_row(format, block, &mut out);
            for (i, &want) in out.iter().enumerate() {
                assert_eq!(bits(unpacked.value(format.sub_block, i)), bits(want), "{} element {i}", format.name);
            }
        }
    }
}

#[test]
fn any_bytes_of_any_length_decode_their_whole_blocks() {
    let mut random = Random::new(1);
    for format in FORMATS {
        let mut bytes = vec![0; 5 * format.block_bytes];
        for _ in 0..200 {
            random.fill(&mut bytes);
            let row = &bytes[..(random.next() % (bytes.len() as u64 + 1)) as usize];
            let mut out =
                vec![f32::from_bits(0x7fc0_dead); (random.next() % (6 * format.block_elements as u64)) as usize];
            let written = decode_row(format, row, &mut out);
            let blocks = (row.len() / format.block_bytes).min(out.len() / format.block_elements);
            assert_eq!(written, blocks * format.block_elements, "{}", format.name);
            assert!(out[written..].iter().all(|x| x.to_bits() == 0x7fc0_dead), "{}", format.name);
        }
    }
}

#[test]
fn random_rows_look_like_weights_and_use_every_code() {
    for format in FORMATS {
        let (rows, cols) = (16, 1024);
        let bytes = random_rows(format, rows, cols, 3);
        assert_eq!(bytes, random_rows(format, rows, cols, 3), "{}", format.name);
        assert_ne!(bytes, random_rows(format, rows, cols, 4), "{}", format.name);
        let mut values = vec![0.0; rows * cols];
        assert_eq!(decode_row(format, &bytes, &mut values), values.len());
        let mean = values.iter().sum::<f32>() / values.len() as f32;
        let rms = (values.iter().map(|x| x * x).sum::<f32>() / values.len() as f32).sqrt();
        let max = values.iter().fold(0.0f32, |max, x| max.max(x.abs()));
        assert!(mean.abs() < 0.1 && (0.05..0.8).contains(&rms) && max < 3.0, "{}: {mean} {rms} {max}", format.name);
        let Some(unpack) = format.unpack else { continue };
        let (mut unpacked, mut seen) = (Default::default(), std::collections::BTreeMap::<i8, usize>::new());
        for block in bytes.chunks_exact(format.block_bytes) {
            unpack(block, &mut unpacked);
            for &code in &unpacked.codes[..format.block_elements] {
                *seen.entry(code).or_default() += 1;
            }
        }
        assert!(seen.values().all(|&n| n * seen.len() * 3 > values.len()), "{}: {seen:?}", format.name);
    }
}
