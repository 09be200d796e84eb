//! Up to four tokens (super-blocks: two) against weights unpacked in registers, sixteen rows at a time: the tile kernels without the detour through a tile.
//!
//! What counts beside the multiplications is taking codes apart: of Q4_0, three operations for each vector of bytes and its two of codes, before the first
//! token's four. Assembly for the same reasons as in `tile`: Q4_0 against one token is 107 instructions a block, 123 with intrinsics, against two 160, not 209.

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::offset_of;

use super::{Acc, V, finish_super, of_stream};
use crate::cpu::isa::Avx2;
use crate::cpu::qgemm::activations::{ByteActs, SuperActs};
use crate::cpu::qgemm::formats::{BIT4, Fields, Format, LOW4, Planes, Scales};
use crate::cpu::qgemm::{STREAMS, Stream, prefetch};

/// What the text reads from memory: a mask of the codes, one of their upper bits or a table, and ones.
#[repr(C, align(32))]
struct Constants([[u32; 8]; 3]);

impl Constants {
    const fn new(low: u32, second: [u32; 8]) -> Self {
        Self([[low; 8], second, [0x0001_0001; 8]])
    }
    const fn table(table: &[i8; 16]) -> [u32; 8] {
        let mut twice = [0; 8];
        let mut i = 0;
        while i < 32 {
            twice[i / 4] |= (table[i % 16] as u8 as u32) << (8 * (i % 4));
            i += 1;
        }
        twice
    }
}

/// What the text of [`block`] needs to know of an encoding.
struct Blocks<F>(F);
impl<F: Format> Blocks<F> {
    /// The first plane of codes, and that of their fifth bits.
    const PLANES: (usize, Option<usize>) = match F::CODES {
        Planes::Nibbles { plane, fifth, .. } => (plane, fifth),
        _ => panic!("blocks of bytes come as nibbles"),
    };
    const TABLE: bool = matches!(F::CODES, Planes::Nibbles { table: Some(_), .. });
    const CONSTANTS: &'static Constants = &Constants::new(
        LOW4,
        match F::CODES {
            Planes::Nibbles { table: Some(table), .. } => Constants::table(table),
            _ => [BIT4; 8],
        },
    );
}

/// Brings the codes of columns `4 c ..` and `16 + 4 c ..`, one half of the rows each.
#[rustfmt::skip]
macro_rules! load {
    ($c:literal, $v0:literal, $v1:literal) => {
        concat!(
            "vmovdqu ", $v0, ", ymmword ptr [{b} + {codes} + 64*", $c, "]\n",
            "vmovdqu ", $v1, ", ymmword ptr [{b} + {codes} + 64*", $c, " + 32]",
        )
    };
}

/// Takes them apart, the lower halves to 8 and 9, and multiplies.
#[rustfmt::skip]
macro_rules! columns {
    ($c:literal, $v0:literal, $v1:literal) => {
        concat!(
            "vpand ymm8, ", $v0, ", ymm6\n", "vpand ymm9, ", $v1, ", ymm6\n",
            "vpsrlw ", $v0, ", ", $v0, ", 4\n", "vpsrlw ", $v1, ", ", $v1, ", 4\n",
            "vpand ", $v0, ", ", $v0, ", ymm6\n", "vpand ", $v1, ", ", $v1, ", ymm6\n",
            ".if {fifth}\n",
            columns!(@fifth $c, "ymm8", $v0, "0"), columns!(@fifth $c, "ymm9", $v1, "32"),
            ".endif\n",
            ".if {table}\n",
            "vpshufb ymm8, ymm7, ymm8\n", "vpshufb ymm9, ymm7, ymm9\n",
            "vpshufb ", $v0, ", ymm7, ", $v0, "\n", "vpshufb ", $v1, ", ymm7, ", $v1, "\n",
            ".endif\n",
            ".if ", $c, "\n",
            further!("vpmaddubsw", "vpaddw", "ymm8", "ymm9", concat!("16*", $c)),
            "\n.else\n",
            first!("vpmaddubsw", "vpaddw", "ymm8", "ymm9", "0", "{m} + {i} + {minus_sum}"),
            "\n.endif\n",
            further!("vpmaddubsw", "vpaddw", $v0, $v1, concat!("16*", $c, " + 64")),
        )
    };
    (@fifth $c:literal, $lo:literal, $hi:literal, $half:literal) => {
        concat!(
            "vmovdqu ymm4, ymmword ptr [{b} + {fifth_at} + ", $half, "]\n",
            "vpslld ymm5, ymm4, 4-", $c, "\n",
            "vpand ymm5, ymm5, ymm7\n",
            "vpor ", $lo, ", ", $lo, ", ymm5\n",
            ".if ", $c, "\nvpsrld ymm4, ymm4, ", $c, "\n.endif\n",
            "vpand ymm4, ymm4, ymm7\n",
            "vpor ", $hi, ", ", $hi, ", ymm4\n",
        )
    };
}

/// The kernel with its lines that bring and multiply codes.
macro_rules! block_kernel {
    ($block:ident, $b:ident, $scales:ident, $acts:ident, $out:ident, $F:ident, $NT:ident; $($line:expr),*) => {
        kernel!(
            "vmovdqa ymm6, ymmword ptr [{k}]", "vmovdqa ymm7, ymmword ptr [{k} + 32]",
            $($line,)*
            tokens!("vpmaddwd ymm\\t, ymm\\t, ymmword ptr [{k} + 64]", "vpmaddwd ymm1\\t, ymm1\\t, ymmword ptr [{k} + 64]"),
            finish!(
                concat!(
                    ".if {f16}\nvcvtph2ps ymm8, xmmword ptr [{b} + {d_at}]\nvcvtph2ps ymm9, xmmword ptr [{b} + {d_at} + 16]\n.else\n",
                    unpacked_scale!(), ".endif\n"
                );
                add_min!()
            );
            b = in(reg) $block, a = in(reg) $acts.q[8 * $b..].as_ptr(), m = in(reg) $acts, s = in(reg) $scales, i = in(reg) 16 * $b,
            out = in(reg) $out.as_mut_ptr(), k = in(reg) Blocks::<$F>::CONSTANTS,
            nt = const $NT, shift = const $F::SHIFT, min = const $F::MIN as u32,
            f16 = const $F::HALF as u32, d_at = const size_of::<$F::Block>() - 32,
            codes = const 64 * Blocks::<$F>::PLANES.0, table = const Blocks::<$F>::TABLE as u32,
            fifth = const Blocks::<$F>::PLANES.1.is_some() as u32,
            fifth_at = const match Blocks::<$F>::PLANES.1 { Some(plane) => 64 * plane, None => 0 },
            minus_sum = const offset_of!(ByteActs, minus_sum), d = const offset_of!(ByteActs, d), sum = const offset_of!(ByteActs, sum),
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
    // As early as there are registers for: what comes from memory is waited for together.
    // SAFETY: reads the block's planes of codes, the constants, block `b` of the scales and activations, and reads and writes `out`; the registers are
    // declared.
    unsafe {
        match NT {
            1 => block_kernel!(block, b, scales, acts, out, F, NT;
                load!("0", "ymm14", "ymm15"), load!("1", "ymm2", "ymm3"), load!("2", "ymm12", "ymm13"), load!("3", "ymm1", "ymm11"),
                columns!("0", "ymm14", "ymm15"), columns!("1", "ymm2", "ymm3"), columns!("2", "ymm12", "ymm13"), columns!("3", "ymm1", "ymm11")),
            2 => block_kernel!(block, b, scales, acts, out, F, NT;
                load!("0", "ymm14", "ymm15"), load!("1", "ymm2", "ymm3"), load!("2", "ymm12", "ymm13"),
                columns!("0", "ymm14", "ymm15"), load!("3", "ymm14", "ymm15"),
                columns!("1", "ymm2", "ymm3"), columns!("2", "ymm12", "ymm13"), columns!("3", "ymm14", "ymm15")),
            _ => block_kernel!(block, b, scales, acts, out, F, NT;
                load!("0", "ymm14", "ymm15"), columns!("0", "ymm14", "ymm15"), load!("1", "ymm14", "ymm15"), columns!("1", "ymm14", "ymm15"),
                load!("2", "ymm14", "ymm15"), columns!("2", "ymm14", "ymm15"), load!("3", "ymm14", "ymm15"), columns!("3", "ymm14", "ymm15")),
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub fn byte_blocks<F: Format, const NT: usize>(
    isa: Avx2,
    streams: &[Stream<'_, F::Block>],
    scales: &mut [Scales; STREAMS],
    acts: &ByteActs,
    out: &mut [[f32; 16]],
) {
    let count = streams[0].blocks.len();
    assert!(count <= acts.d.len());
    for b in 0..count {
        for (s, stream) in streams.iter().enumerate() {
            prefetch(isa, stream.next.wrapping_add(b), 0, 1);
            if !F::HALF {
                F::scales::<V>(&stream.blocks[b], b, &mut scales[s]);
            }
            block::<F, NT>(&stream.blocks[b], b, &scales[s], acts, of_stream(out, s));
        }
    }
}

/// What the text of [`part`] needs to know of an encoding.
struct Super<F, const PART: usize>(F);
impl<F: Format, const PART: usize> Super<F, PART> {
    const MASKS: (u32, u32) = match F::CODES {
        Planes::Fields { low, top, .. } => (low, top),
        _ => panic!("super-blocks of bytes come as fields"),
    };
    const FIELDS: Fields = match F::CODES {
        Planes::Fields { of_part, .. } => of_part[PART],
        _ => panic!("super-blocks of bytes come as fields"),
    };
    const CONSTANTS: &'static Constants = &Constants::new(Self::MASKS.0, [Self::MASKS.1; 8]);
}

/// `to`: the codes of a field of the planes at step `\c`, whose low bits are in `from`, for the half of the rows at `half`.
#[rustfmt::skip]
macro_rules! field {
    ($to:literal, $from:literal, $shift:literal, $top_shift:literal, $half:literal) => {
        concat!(
            ".if {", $shift, "}\n",
            "vpsrld ", $to, ", ", $from, ", {", $shift, "}\n",
            "vpand ", $to, ", ", $to, ", ymm6\n",
            ".else\n",
            "vpand ", $to, ", ", $from, ", ymm6\n",
            ".endif\n",
            ".if {top}\n",
            "vmovdqu ymm4, ymmword ptr [{b} + {top_at} + 64*\\c + ", $half, "]\n",
            ".if {", $top_shift, "} > 0\n", "vpslld ymm4, ymm4, {", $top_shift, "}\n", ".endif\n",
            ".if {", $top_shift, "} < 0\n", "vpsrld ymm4, ymm4, -({", $top_shift, "})\n", ".endif\n",
            "vpand ymm4, ymm4, ymm7\n",
            "vpor ", $to, ", ", $to, ", ymm4\n",
            ".endif\n",
        )
    };
}

/// Part `PART` of a super-block; registers 2, 3, 12 and 13 hold the second sub-block's sums.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn part<F: Format, const SUBS: usize, const NT: usize, const PART: usize>(
    block: &F::Block,
    scales: &Scales,
    acts: &SuperActs,
    dot: &mut Acc<NT>,
) {
    const { assert!(NT <= 2 && (SUBS == 16 || F::SHIFT == 0), "registers; minus_sum is per 16 columns") };
    // SAFETY: reads the block's planes of codes, the constants, the scales and activations, and reads and writes `dot`; the registers are declared.
    unsafe {
        kernel!(
            "vmovdqa ymm6, ymmword ptr [{k}]", "vmovdqa ymm7, ymmword ptr [{k} + 32]",
            concat!(
                ".irp c,0,1,2,3,4,5,6,7\n.if \\c < {steps}\n",
                "vmovdqu ymm14, ymmword ptr [{b} + {low_at} + 64*\\c]\n",
                "vmovdqu ymm15, ymmword ptr [{b} + {low_at} + 64*\\c + 32]\n",
                field!("ymm8", "ymm14", "shift0", "top0", "0"), field!("ymm9", "ymm15", "shift0", "top0", "32"),
                ".if \\c\n",
                further!("vpmaddubsw", "vpaddw", "ymm8", "ymm9", "{a0} + 16*\\c"),
                "\n.else\n",
                first!("vpmaddubsw", "vpaddw", "ymm8", "ymm9", "{a0}", "{m} + {start0}"),
                "\n.endif\n",
                field!("ymm14", "ymm14", "shift1", "top1", "0"), field!("ymm15", "ymm15", "shift1", "top1", "32"),
                ".if \\c\n",
                further!("vpmaddubsw", "vpaddw", "ymm14", "ymm15", "{a1} + 16*\\c", "2,3" - "2"),
                "\n.else\n",
                first!("vpmaddubsw", "vpaddw", "ymm14", "ymm15", "{a1}", "{m} + {start1}", "2,3" - "2"),
                "\n.endif\n",
                "\n.endif\n.endr"
            ),
            tokens!("vpmaddwd ymm\\t, ymm\\t, ymmword ptr [{s} + {scale0}]", "vpmaddwd ymm1\\t, ymm1\\t, ymmword ptr [{s} + {scale0} + 32]"),
            tokens!("2,3" - "2"; "vpmaddwd ymm\\t, ymm\\t, ymmword ptr [{s} + {scale1}]", "vpmaddwd ymm1\\t, ymm1\\t, ymmword ptr [{s} + {scale1} + 32]"),
            "vpaddd ymm0, ymm0, ymm2", "vpaddd ymm10, ymm10, ymm12",
            ".if {nt} > 1", "vpaddd ymm1, ymm1, ymm3", "vpaddd ymm11, ymm11, ymm13", ".endif",
            tokens!(
                "vpaddd ymm\\t, ymm\\t, ymmword ptr [{dot} + 64*\\t]",
                "vpaddd ymm1\\t, ymm1\\t, ymmword ptr [{dot} + 64*\\t + 32]",
                "vmovdqa ymmword ptr [{dot} + 64*\\t], ymm\\t",
                "vmovdqa ymmword ptr [{dot} + 64*\\t + 32], ymm1\\t"
            );
            b = in(reg) block, a = in(reg) acts.q.as_ptr(), m = in(reg) acts, s = in(reg) scales, dot = in(reg) dot,
            k = in(reg) Super::<F, PART>::CONSTANTS,
            nt = const NT, steps = const 64 / SUBS, shift = const F::SHIFT,
            low_at = const 64 * Super::<F, PART>::FIELDS.plane,
            top = const (Super::<F, PART>::MASKS.1 > 0) as u32, top_at = const 64 * Super::<F, PART>::FIELDS.top,
            shift0 = const Super::<F, PART>::FIELDS.shift[0], shift1 = const Super::<F, PART>::FIELDS.shift[1],
            top0 = const Super::<F, PART>::FIELDS.top_shift[0], top1 = const Super::<F, PART>::FIELDS.top_shift[1],
            a0 = const 16 * (64 / SUBS) * Super::<F, PART>::FIELDS.sub[0], a1 = const 16 * (64 / SUBS) * Super::<F, PART>::FIELDS.sub[1],
            start0 = const offset_of!(SuperActs, minus_sum) + 16 * Super::<F, PART>::FIELDS.sub[0],
            start1 = const offset_of!(SuperActs, minus_sum) + 16 * Super::<F, PART>::FIELDS.sub[1],
            scale0 = const offset_of!(Scales, sub_scale) + 64 * Super::<F, PART>::FIELDS.sub[0],
            scale1 = const offset_of!(Scales, sub_scale) + 64 * Super::<F, PART>::FIELDS.sub[1]
        );
    }
}

/// The streams advance together from part to part.
#[target_feature(enable = "avx2,fma,f16c")]
pub fn byte_super<F: Format, const SUBS: usize, const NT: usize>(
    isa: Avx2,
    streams: &[Stream<'_, F::Block>],
    scales: &mut [Scales; STREAMS],
    acts: &SuperActs,
    out: &mut [[f32; 16]],
) {
    let mut dots: [Acc<NT>; STREAMS] = [[[_mm256_setzero_si256(); 2]; NT]; STREAMS];
    for (stream, scales) in streams.iter().zip(scales.iter_mut()) {
        F::scales::<V>(&stream.blocks[0], 0, scales);
    }
    macro_rules! parts {
        ($($part:literal)*) => { $(if $part < F::PARTS {
            for ((stream, scales), dot) in streams.iter().zip(scales.iter()).zip(&mut dots) {
                prefetch(isa, stream.next, $part, F::PARTS);
                part::<F, SUBS, NT, $part>(&stream.blocks[0], scales, acts, dot);
            }
        })* };
    }
    parts!(0 1 2 3 4 5 6 7);
    for (s, (scales, dot)) in scales.iter().zip(dots).enumerate().take(streams.len()) {
        finish_super::<F, SUBS, NT>(scales, acts, dot, of_stream(out, s));
    }
}
