//! Up to four tokens at a time against packed blocks unpacked in registers, sixteen rows of them: the tile kernels without the detour through a tile.
//!
//! What counts beside the multiplications is taking codes apart: of four bits, three operations for each vector of bytes and its two of codes, before the
//! first token's four; of six bits, 11 for four. Assembly for the same reasons as in `tile`: Q4_0 against one token is 107 instructions a block, 123 with
//! intrinsics, against two 160, not 209. A super-block is a loop over its units, so that the code of one is all there is.

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::offset_of;

use super::assembly::end;
use super::{Acc, V, finish_super};
use crate::cpu::isa::Avx2;
use crate::cpu::qgemm::activations::{ByteActs, Family, SuperActs, WordActs};
use crate::cpu::qgemm::formats::{Format, Scales};
use crate::cpu::qgemm::{Isa, STREAMS, Stream, prefetch, tokens_of};

/// What the text reads from memory: masks (or one and a table), and ones; for words, the mask of the lower bytes and sixteens are third and fourth.
#[repr(C, align(32))]
struct Constants([[u32; 8]; 5]);

/// What the text needs to know of an encoding.
struct Text<F>(F);
impl<F: Format> Text<F> {
    const CONSTANTS: &'static Constants = {
        let masks: [u32; 4] = match F::UNIT.bits {
            4 => [0x0f, 0, 0, 0],
            5 => [0x1f, 0xe0, 0xc0, 0x20],
            6 => [0x3f, 0xc0, 0, 0],
            3 => [0x07, 0xc0, 0, 0],
            2 => [0x03, 0, 0, 0],
            _ => [0; 4],
        };
        let mut all = [[0x0001_0001; 8]; 5];
        let mut i = 0;
        while i < 4 {
            all[i] = [0x0101_0101 * masks[i]; 8];
            i += 1;
        }
        if <F::Family as Family>::WORDS {
            all[2] = [0x00ff_00ff; 8];
            all[3] = [0x0010_0010; 8];
        }
        if let Some(table) = F::TABLE {
            all[1] = [0; 8];
            let mut i = 0;
            while i < 32 {
                all[1][i / 4] |= (table[i % 16] as u8 as u32) << (8 * (i % 4));
                i += 1;
            }
        }
        &Constants(all)
    };
}

/// The products of step `c`, whose codes are in the two registers: the first of a sub-block or a further one; after its last, its scale.
#[rustfmt::skip]
macro_rules! step {
    ($c:literal, $w0:literal, $w1:literal) => {
        concat!(
            ".if {words}\n.if {nt} < 3\n", digits!($c, $w0, $w1), "\n.else\n", words!($c), "\n.endif\n.else\n",
            ".if ", $c, " & ({sub} - 1)\n",
            further!("vpmaddubsw", "vpaddw", $w0, $w1, concat!("16*", $c)),
            "\n.else\n",
            first!("vpmaddubsw", "vpaddw", $w0, $w1, concat!("16*", $c), concat!("{m} + {i} + {minus_sum} + 16*(", $c, "/{sub})")),
            "\n.endif\n",
            ".if {super}\n.if (", $c, " & ({sub} - 1)) == {sub} - 1\n", add_sub!($c), "\n.endif\n.endif\n",
            ".endif\n",
        )
    };
}

/// The products of step `c`, its codes in 8 and 9, with activations widened to 16 bits.
#[rustfmt::skip]
macro_rules! words {
    ($c:literal) => {
        concat!(
            ".if {table}\nvpshufb ymm8, ymm7, ymm8\nvpshufb ymm9, ymm7, ymm9\n.endif\n",
            "vpand ymm14, ymm8, ymmword ptr [{k} + 64]\nvpand ymm15, ymm9, ymmword ptr [{k} + 64]\n",
            ".if ", $c, "\n",
            further!("vpmaddwd", "vpaddd", "ymm14", "ymm15", concat!("32*", $c)),
            "\n.else\n",
            first!("vpmaddwd", "vpaddd", "ymm14", "ymm15", concat!("32*", $c), "{m}"),
            "\n.endif\n",
            "vpsrlw ymm8, ymm8, 8\nvpsrlw ymm9, ymm9, 8\n",
            further!("vpmaddwd", "vpaddd", "ymm8", "ymm9", concat!("32*", $c, " + 16")),
        )
    };
}

/// The same with the activations' digits, of one or two tokens: 32 columns of codes up to 255 times digits up to 8 fit into 16 bits, and codes need not be
/// widened. The low digits' sums are where those of bytes are, the high ones' in registers 2, 3, 12 and 13.
#[rustfmt::skip]
macro_rules! digits {
    ($c:literal, $w0:literal, $w1:literal) => {
        concat!(
            ".irp t,0,1,2,3\n.if (\\t & 1) < {nt}\n",
            "vpbroadcastd ymm4, dword ptr [{a} + 32*", $c, " + 8 + 8*(\\t/2) + 4*\\t]\n",
            ".if ", $c, "\n",
            "vpmaddubsw ymm5, ", $w0, ", ymm4\nvpmaddubsw ymm4, ", $w1, ", ymm4\n",
            "vpaddw ymm\\t, ymm\\t, ymm5\nvpaddw ymm1\\t, ymm1\\t, ymm4\n",
            ".else\n",
            "vpmaddubsw ymm\\t, ", $w0, ", ymm4\nvpmaddubsw ymm1\\t, ", $w1, ", ymm4\n",
            ".endif\n.endif\n.endr",
        )
    };
}

/// The sums of digits put together.
macro_rules! join_digits {
    () => {
        concat!(
            tokens!(
                "vpmaddwd ymm\\t, ymm\\t, ymmword ptr [{k} + 128]",
                "vpmaddwd ymm1\\t, ymm1\\t, ymmword ptr [{k} + 128]"
            ),
            "\nvpmaddwd ymm2, ymm2, ymmword ptr [{k} + 96]\nvpmaddwd ymm12, ymm12, ymmword ptr [{k} + 96]\n",
            "vpaddd ymm0, ymm0, ymm2\nvpaddd ymm10, ymm10, ymm12\n",
            ".if {nt} == 2\nvpmaddwd ymm3, ymm3, ymmword ptr [{k} + 96]\nvpmaddwd ymm13, ymm13, ymmword ptr [{k} + 96]\n",
            "vpaddd ymm1, ymm1, ymm3\nvpaddd ymm11, ymm11, ymm13\n.endif",
        )
    };
}

/// `dot += sums * scale` of the sub-block that ends with step `c`. Up to two tokens' dots are in registers 2, 3, 12 and 13.
macro_rules! add_sub {
    ($c:literal) => {
        concat!(
            tokens!(
                concat!("vpmaddwd ymm\\t, ymm\\t, ymmword ptr [{s} + 4*{i} + {scale} + 64*(", $c, "/{sub})]"),
                concat!("vpmaddwd ymm1\\t, ymm1\\t, ymmword ptr [{s} + 4*{i} + {scale} + 64*(", $c, "/{sub}) + 32]"),
                ".if {nt} > 2",
                "vpaddd ymm\\t, ymm\\t, ymmword ptr [{out} + 64*\\t]",
                "vpaddd ymm1\\t, ymm1\\t, ymmword ptr [{out} + 64*\\t + 32]",
                "vmovdqa ymmword ptr [{out} + 64*\\t], ymm\\t",
                "vmovdqa ymmword ptr [{out} + 64*\\t + 32], ymm1\\t",
                ".endif"
            ),
            "\n.if {nt} < 3\nvpaddd ymm2, ymm2, ymm0\nvpaddd ymm12, ymm12, ymm10\n",
            ".if {nt} == 2\nvpaddd ymm3, ymm3, ymm1\nvpaddd ymm13, ymm13, ymm11\n.endif\n.endif",
        )
    };
}

/// Plane `p` of the unit, from byte `half` on: those of eight rows.
#[rustfmt::skip]
macro_rules! plane {
    ($p:literal, $half:literal) => { concat!("ymmword ptr [{b} + {codes} + 64*", $p, " + ", $half, "]") };
}

/// Step `c` of codes that are the low bits of plane `p`.
#[rustfmt::skip]
macro_rules! low_bits {
    ($c:literal, $p:literal) => {
        concat!(
            "vpand ymm8, ymm6, ", plane!($p, "0"), "\n", "vpand ymm9, ymm6, ", plane!($p, "32"), "\n",
            step!($c, "ymm8", "ymm9"),
        )
    };
}

/// Step `c` of codes that lie `shift` bits up in plane `p`.
#[rustfmt::skip]
macro_rules! high_bits {
    ($c:literal, $p:literal, $shift:literal) => {
        concat!(
            "vmovdqu ymm8, ", plane!($p, "0"), "\n", "vmovdqu ymm9, ", plane!($p, "32"), "\n",
            "vpsrlw ymm8, ymm8, ", $shift, "\n", "vpsrlw ymm9, ymm9, ", $shift, "\n",
            "vpand ymm8, ymm8, ymm6\n", "vpand ymm9, ymm9, ymm6\n",
            step!($c, "ymm8", "ymm9"),
        )
    };
}

/// Brings the pieces to 8 and 9: `piece` masked, the sum so far shifted to the right before the next joins it, and at the end.
#[rustfmt::skip]
macro_rules! pieces {
    ($mask:literal, $p:literal, $shift:literal $(; $masks:literal, $ps:literal, $shifts:literal)*) => {
        concat!(
            "vpand ymm8, ", $mask, ", ", plane!($p, "0"), "\n", "vpand ymm9, ", $mask, ", ", plane!($p, "32"), "\n",
            "vpsrlw ymm8, ymm8, ", $shift, "\n", "vpsrlw ymm9, ymm9, ", $shift, "\n",
            $(
                "vpand ymm4, ", $masks, ", ", plane!($ps, "0"), "\n", "vpand ymm5, ", $masks, ", ", plane!($ps, "32"), "\n",
                "vpor ymm8, ymm8, ymm4\n", "vpor ymm9, ymm9, ymm5\n",
                "vpsrlw ymm8, ymm8, ", $shifts, "\n", "vpsrlw ymm9, ymm9, ", $shifts, "\n",
            )*
        )
    };
}

/// Brings plane `c` to the registers.
#[rustfmt::skip]
macro_rules! load {
    ($c:literal, $v0:literal, $v1:literal) => {
        concat!("vmovdqu ", $v0, ", ", plane!($c, "0"), "\n", "vmovdqu ", $v1, ", ", plane!($c, "32"))
    };
}

/// Takes nibbles apart, the low ones to 8 and 9, and multiplies.
#[rustfmt::skip]
macro_rules! nibbles {
    ($c:literal, $c4:literal, $v0:literal, $v1:literal) => {
        concat!(
            "vpand ymm8, ", $v0, ", ymm6\n", "vpand ymm9, ", $v1, ", ymm6\n",
            "vpsrlw ", $v0, ", ", $v0, ", 4\n", "vpsrlw ", $v1, ", ", $v1, ", 4\n",
            "vpand ", $v0, ", ", $v0, ", ymm6\n", "vpand ", $v1, ", ", $v1, ", ymm6\n",
            ".if {table}\n",
            "vpshufb ymm8, ymm7, ymm8\n", "vpshufb ymm9, ymm7, ymm9\n",
            "vpshufb ", $v0, ", ymm7, ", $v0, "\n", "vpshufb ", $v1, ", ymm7, ", $v1, "\n",
            ".endif\n",
            step!($c, "ymm8", "ymm9"), step!($c4, $v0, $v1),
        )
    };
}

/// Step `c` of codes of eight bits.
#[rustfmt::skip]
macro_rules! byte {
    ($c:literal) => { concat!(load!($c, "ymm8", "ymm9"), "\n", step!($c, "ymm8", "ymm9")) };
}

/// A unit, with as few registers as four tokens leave.
#[rustfmt::skip]
macro_rules! unit {
    () => {
        concat!(
            ".if {words} && {bits} == 4 && {nt} > 2\n",
            low_bits!("0", "0"), high_bits!("4", "0", "4"), low_bits!("1", "1"), high_bits!("5", "1", "4"),
            low_bits!("2", "2"), high_bits!("6", "2", "4"), low_bits!("3", "3"), high_bits!("7", "3", "4"),
            ".endif\n",
            ".if {bits} == 8\n",
            byte!("0"), byte!("1"), byte!("2"), byte!("3"), byte!("4"), byte!("5"), byte!("6"), byte!("7"),
            ".endif\n",
            ".if ({words} == 0 || {nt} < 3) && {bits} == 4\n",
            load!("0", "ymm14", "ymm15"), "\n", nibbles!("0", "4", "ymm14", "ymm15"), load!("1", "ymm14", "ymm15"), "\n", nibbles!("1", "5", "ymm14", "ymm15"),
            load!("2", "ymm14", "ymm15"), "\n", nibbles!("2", "6", "ymm14", "ymm15"), load!("3", "ymm14", "ymm15"), "\n", nibbles!("3", "7", "ymm14", "ymm15"),
            ".endif\n",
            ".if {bits} == 5\n",
            low_bits!("0", "0"), low_bits!("1", "1"), low_bits!("2", "2"), low_bits!("3", "3"), low_bits!("4", "4"),
            pieces!("ymm14", "1", "3"; "ymm7", "0", "3"), step!("5", "ymm8", "ymm9"),
            pieces!("ymm14", "3", "3"; "ymm7", "2", "3"), step!("6", "ymm8", "ymm9"),
            pieces!("ymm15", "1", "1"; "ymm15", "3", "1"; "ymm7", "4", "3"), step!("7", "ymm8", "ymm9"),
            ".endif\n",
            ".if {bits} == 6\n",
            low_bits!("0", "0"), low_bits!("1", "1"), low_bits!("2", "2"),
            pieces!("ymm7", "0", "2"; "ymm7", "1", "2"; "ymm7", "2", "2"), step!("3", "ymm8", "ymm9"),
            ".endif\n",
            ".if {bits} == 3\n",
            low_bits!("0", "0"), high_bits!("1", "0", "3"), low_bits!("2", "1"),
            pieces!("ymm7", "0", "2"; "ymm7", "1", "2"; "ymm7", "2", "2"),
            "vpsrlw ymm14, ymm8, 3\n", "vpsrlw ymm15, ymm9, 3\n", "vpand ymm8, ymm8, ymm6\n", "vpand ymm9, ymm9, ymm6\n",
            step!("3", "ymm8", "ymm9"),
            high_bits!("4", "1", "3"), low_bits!("5", "2"), high_bits!("6", "2", "3"),
            "vpand ymm14, ymm14, ymm6\n", "vpand ymm15, ymm15, ymm6\n",
            step!("7", "ymm14", "ymm15"),
            ".endif\n",
            ".if {bits} == 2\n",
            low_bits!("0", "0"), high_bits!("1", "0", "2"), high_bits!("2", "0", "4"), high_bits!("3", "0", "6"),
            ".endif\n",
        )
    };
}

macro_rules! masks {
    () => {
        concat!(
            "vmovdqa ymm6, ymmword ptr [{k}]\nvmovdqa ymm7, ymmword ptr [{k} + 32]\n",
            ".if {bits} == 5\nvmovdqa ymm14, ymmword ptr [{k} + 64]\nvmovdqa ymm15, ymmword ptr [{k} + 96]\n.endif",
        )
    };
}

/// The kernel of 32 columns with a scale of their own, with its lines that bring and multiply codes.
macro_rules! block_kernel {
    ($codes:ident, $at:ident, $scales:ident, $Acts:ident, $acts:ident, $minus_sum:expr, $sum:expr, $out:ident, $F:ident, $NT:ident; $($line:expr),*) => {
        kernel!(
            masks!(),
            $($line,)*
            ".if {words}",
            ".if {nt} < 3", join_digits!(), ".endif",
            tokens!(
                "vpbroadcastd ymm4, dword ptr [{m} + {i} + {offset} + 4*\\t]",
                "vpaddd ymm\\t, ymm\\t, ymm4", "vpaddd ymm1\\t, ymm1\\t, ymm4"
            ),
            ".else",
            tokens!("vpmaddwd ymm\\t, ymm\\t, ymmword ptr [{k} + 128]", "vpmaddwd ymm1\\t, ymm1\\t, ymmword ptr [{k} + 128]"),
            ".endif",
            finish!(
                concat!(
                    ".if {f16}\nvcvtph2ps ymm8, xmmword ptr [{b} + {d_at}]\nvcvtph2ps ymm9, xmmword ptr [{b} + {d_at} + 16]\n.else\n",
                    unpacked_scale!(), ".endif\n"
                );
                add_min!()
            );
            b = in(reg) $codes, a = in(reg) $acts.q[$acts.q.len() / 8 * $at..].as_ptr(), m = in(reg) $acts, s = in(reg) $scales, i = in(reg) 16 * $at,
            out = in(reg) $out.as_mut_ptr(), k = in(reg) Text::<$F>::CONSTANTS,
            nt = const $NT, shift = const $F::SHIFT, min = const $F::MIN as u32, super = const 0, sub = const 8,
            words = const <$F::Family as Family>::WORDS as u32, offset = const offset_of!(WordActs, offset), f16 = const $F::HALF as u32, d_at = const size_of::<$F::Block>() - 32,
            bits = const $F::UNIT.bits, codes = const 64 * $F::CODES, table = const $F::TABLE.is_some() as u32,
            minus_sum = const $minus_sum, d = const offset_of!($Acts, d), sum = const $sum,
            scale = const offset_of!(Scales, scale), mins = const offset_of!(Scales, min)
        )
    };
}

/// Block `b` of one stream.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn block<F: Format, const NT: usize>(
    block: &F::Block,
    b: usize,
    scales: &Scales,
    acts: &ByteActs,
    out: &mut [[f32; 16]; NT],
) {
    const { assert!(F::UNITS == 1) };
    macro_rules! kernel_of {
        ($($line:expr),*) => {
            block_kernel!(block, b, scales, ByteActs, acts, offset_of!(ByteActs, minus_sum), offset_of!(ByteActs, sum), out, F, NT; $($line),*)
        };
    }
    // As early as there are registers for: what comes from memory is waited for together.
    // SAFETY: reads the block's planes of codes, the constants, block `b` of the scales and activations, and reads and writes `out`; the registers are
    // declared.
    unsafe {
        match (NT, F::UNIT.bits) {
            (1, 4) => kernel_of!(
                load!("0", "ymm14", "ymm15"),
                load!("1", "ymm2", "ymm3"),
                load!("2", "ymm12", "ymm13"),
                load!("3", "ymm1", "ymm11"),
                nibbles!("0", "4", "ymm14", "ymm15"),
                nibbles!("1", "5", "ymm2", "ymm3"),
                nibbles!("2", "6", "ymm12", "ymm13"),
                nibbles!("3", "7", "ymm1", "ymm11")
            ),
            (2, 4) => kernel_of!(
                load!("0", "ymm14", "ymm15"),
                load!("1", "ymm2", "ymm3"),
                load!("2", "ymm12", "ymm13"),
                nibbles!("0", "4", "ymm14", "ymm15"),
                load!("3", "ymm14", "ymm15"),
                nibbles!("1", "5", "ymm2", "ymm3"),
                nibbles!("2", "6", "ymm12", "ymm13"),
                nibbles!("3", "7", "ymm14", "ymm15")
            ),
            _ => kernel_of!(unit!()),
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub fn byte_blocks<F: Format, const NT: usize>(
    isa: Avx2,
    streams: &[Stream<'_, F::Block>],
    scales: &mut [Scales; STREAMS],
    acts: &ByteActs,
    out: &mut [&mut [[f32; 16]]],
) {
    let count = streams[0].blocks.len();
    assert!(count <= acts.d.len());
    for b in 0..count {
        for (s, stream) in streams.iter().enumerate() {
            prefetch(isa, stream.next.wrapping_add(b), 0, 1);
            if !F::HALF && !stream.again {
                F::scales::<V>(&stream.blocks[b], b, &mut scales[s]);
            }
            block::<F, NT>(&stream.blocks[b], b, &scales[s], acts, tokens_of(out[s]));
        }
    }
}

/// Unit `unit` of one stream's block `b`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn word_unit<F: Format, const NT: usize>(
    block: &F::Block,
    b: usize,
    unit: usize,
    scales: &Scales,
    acts: &WordActs,
    out: &mut [[f32; 16]; NT],
) {
    const { assert!(F::UNIT.steps() == 8 && !F::MIN && (F::UNITS == 1 || !F::HALF)) };
    let at = b + unit;
    assert!(unit < F::UNITS && at < acts.d.len());
    let block = std::ptr::from_ref(block).cast::<[u32; 16]>().wrapping_add(F::UNIT.planes * unit);
    // SAFETY: reads the unit's planes, the block's scale, the constants, place `at` of the scales and activations, and reads and writes `out`; the
    // registers are declared.
    unsafe { block_kernel!(block, at, scales, WordActs, acts, 0, 0, out, F, NT; unit!()) }
}

/// 32 columns with a scale of their own, a block or one of a block's eight units.
#[target_feature(enable = "avx2,fma,f16c")]
pub fn word_blocks<F: Format, const NT: usize>(
    isa: Avx2,
    streams: &[Stream<'_, F::Block>],
    scales: &mut [Scales; STREAMS],
    acts: &WordActs,
    out: &mut [&mut [[f32; 16]]],
) {
    for b in 0..streams[0].blocks.len() {
        if !F::HALF {
            for (stream, scales) in streams.iter().zip(scales.iter_mut()).filter(|(stream, _)| !stream.again) {
                F::scales::<V>(&stream.blocks[b], b, scales);
            }
        }
        for unit in 0..F::UNITS {
            for (s, stream) in streams.iter().enumerate() {
                prefetch(isa, stream.next.wrapping_add(b), unit, F::UNITS);
                word_unit::<F, NT>(&stream.blocks[b], b, unit, &scales[s], acts, tokens_of(out[s]));
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub fn byte_super<F: Format, const SUBS: usize, const NT: usize>(
    isa: Avx2,
    streams: &[Stream<'_, F::Block>],
    scales: &mut [Scales; STREAMS],
    acts: &SuperActs,
    out: &mut [&mut [[f32; 16]]],
) {
    for (s, (stream, scales)) in streams.iter().zip(scales).enumerate() {
        let next = stream.next.cast::<u8>();
        if !stream.again {
            let lines = size_of::<F::Block>().div_ceil(64);
            for line in (0..F::CODES).chain(F::CODES + F::UNITS * F::UNIT.planes..lines) {
                isa.prefetch(next.wrapping_add(64 * line));
            }
            F::scales::<V>(&stream.blocks[0], 0, scales);
        }
        let dot = super_block::<F, SUBS, NT>(&stream.blocks[0], next, scales, acts);
        finish_super::<F, SUBS, NT>(scales, acts, dot, tokens_of(out[s]));
    }
}

/// The integer sums of a super-block, each sub-block's times its scale.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn super_block<F: Format, const SUBS: usize, const NT: usize>(
    block: &F::Block,
    next: *const u8,
    scales: &Scales,
    acts: &SuperActs,
) -> Acc<NT> {
    const { assert!(SUBS == 16 || F::SHIFT == 0, "minus_sum is per 16 columns") };
    let mut dot: Acc<NT> = [[_mm256_setzero_si256(); 2]; NT];
    // SAFETY: reads the block's planes of codes, the constants, the scales and activations, and reads and writes `dot`; the registers are declared.
    unsafe {
        kernel!(
            masks!(),
            ".if {nt} < 3", "vpxor xmm2, xmm2, xmm2", "vpxor xmm3, xmm3, xmm3", "vpxor xmm12, xmm12, xmm12", "vpxor xmm13, xmm13, xmm13", ".endif",
            ".p2align 5", "2:",
            ".irp p,0,1,2,3,4\n.if \\p < {planes}\nprefetcht0 byte ptr [{n} + {codes} + 64*\\p]\n.endif\n.endr",
            unit!(),
            "add {b}, 64 * {planes}", "add {n}, 64 * {planes}", "add {a}, 16 * {steps}", "add {i}, 16 * {steps} / {sub}", "jnz 2b",
            ".if {nt} < 3", "vmovdqa ymmword ptr [{out}], ymm2", "vmovdqa ymmword ptr [{out} + 32], ymm12", ".endif",
            ".if {nt} == 2", "vmovdqa ymmword ptr [{out} + 64], ymm3", "vmovdqa ymmword ptr [{out} + 96], ymm13", ".endif";
            b = inout(reg) block => _, n = inout(reg) next => _, a = inout(reg) acts.q.as_ptr() => _, m = in(reg) end(acts, 16 * SUBS),
            s = in(reg) end(scales, 64 * SUBS), i = inout(reg) -16 * SUBS as isize => _, out = in(reg) dot.as_mut_ptr(), k = in(reg) Text::<F>::CONSTANTS,
            nt = const NT, shift = const F::SHIFT, super = const 1, sub = const 64 / SUBS, words = const 0, steps = const F::UNIT.steps(), planes = const F::UNIT.planes,
            bits = const F::UNIT.bits, codes = const 64 * F::CODES, table = const 0,
            minus_sum = const offset_of!(SuperActs, minus_sum), scale = const offset_of!(Scales, sub_scale)
        );
    }
    dot
}
