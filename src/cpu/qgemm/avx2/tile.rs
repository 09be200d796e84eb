//! The tile kernels: sixteen rows by 256 columns, unpacked in L1, against up to four tokens.
//!
//! Naively, for each block, token and row
//! ```text
//! sum = 0; for each column: sum += (q_w - offset) * q_a
//! out += scale_w * scale_a * sum
//! ```
//! Eight rows by four columns make a vector, so a broadcast dword of activations meets two of them a step; the eight accumulators of 16 bits (see the head
//! of `avx2`) leave eight registers. A multiplication and an addition for each vector is what the ports have to do, and all else should hide behind them:
//!
//! * the outputs live in memory, not in registers: each vector of them comes from L1 and goes there once a block, while the ports are busy;
//! * a kernel is one piece of assembly. Written with intrinsics, the compiler regroups the 16-bit additions until accumulators are spilled within a step;
//!   with a few steps a piece, it keeps outputs in registers from block to block and spills around the pieces (Q4_0 on a Zen 3: a fifth slower).

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::offset_of;

use super::assembly::end;
use super::{Acc, finish_super};
use crate::cpu::qgemm::activations::{ByteActs, SuperActs, WordActs};
use crate::cpu::qgemm::formats::{Format, Scales, Tile};

/// All steps of a block: four columns each, or two as words.
macro_rules! steps {
    ($others:literal, $mul:literal, $add:literal) => {
        concat!(
            "vmovdqa ymm8, ymmword ptr [{w}]\n",
            "vmovdqa ymm9, ymmword ptr [{w} + 32]\n",
            first!($mul, $add, "ymm8", "ymm9", "0", "{m} + {i} + {minus_sum}"),
            "\n.irp s,",
            $others,
            "\n.if \\s < {steps}\n",
            "vmovdqa ymm8, ymmword ptr [{w} + 64*\\s]\n",
            "vmovdqa ymm9, ymmword ptr [{w} + 64*\\s + 32]\n",
            further!($mul, $add, "ymm8", "ymm9", "16*\\s"),
            "\n.endif\n.endr",
        )
    };
}

#[target_feature(enable = "avx2,fma,f16c")]
pub fn byte_blocks<F: Format, const NT: usize>(tile: &Tile, acts: &ByteActs, blocks: usize, out: &mut [[f32; 16]; NT]) {
    assert!(blocks <= acts.d.len());
    if blocks == 0 {
        return;
    }
    // SAFETY: reads `blocks` blocks of the tile and of the activations, which have eight, and reads and writes `out`; the registers are declared.
    unsafe {
        kernel!(
            "vpcmpeqw ymm15, ymm15, ymm15", "vpsrlw ymm15, ymm15, 15", ".p2align 5", "2:",
            steps!("1,2,3,4,5,6,7", "vpmaddubsw", "vpaddw"),
            tokens!("vpmaddwd ymm\\t, ymm\\t, ymm15", "vpmaddwd ymm1\\t, ymm1\\t, ymm15"),
            finish!(unpacked_scale!(); add_min!()),
            "add {w}, 64 * {steps}", "add {a}, 16 * {steps}", "add {i}, 16", "jnz 2b";
            w = inout(reg) tile.q.as_ptr() => _, a = inout(reg) acts.q.as_ptr() => _, m = in(reg) end(acts, 16 * blocks), s = in(reg) end(&tile.scales, 64 * blocks),
            i = inout(reg) -16 * blocks as isize => _, out = in(reg) out.as_mut_ptr(),
            nt = const NT, steps = const 8, shift = const F::SHIFT, min = const F::MIN as u32,
            minus_sum = const offset_of!(ByteActs, minus_sum), d = const offset_of!(ByteActs, d), sum = const offset_of!(ByteActs, sum),
            scale = const offset_of!(Scales, scale), mins = const offset_of!(Scales, min)
        );
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub fn byte_super<F: Format, const SUBS: usize, const NT: usize>(
    tile: &Tile,
    acts: &SuperActs,
    out: &mut [[f32; 16]; NT],
) {
    const { assert!(SUBS == 16 || F::SHIFT == 0, "minus_sum is per 16 columns") };
    let mut dot: Acc<NT> = [[_mm256_setzero_si256(); 2]; NT];
    // SAFETY: reads the whole tile and activations, and reads and writes `dot`; the registers are declared.
    unsafe {
        kernel!(
            ".p2align 5", "2:",
            steps!("1,2,3,4,5,6,7", "vpmaddubsw", "vpaddw"),
            "vmovdqa ymm8, ymmword ptr [{s} + 4*{i} + {scale}]", "vmovdqa ymm9, ymmword ptr [{s} + 4*{i} + {scale} + 32]",
            tokens!(
                "vpmaddwd ymm\\t, ymm\\t, ymm8",
                "vpmaddwd ymm1\\t, ymm1\\t, ymm9",
                "vpaddd ymm\\t, ymm\\t, ymmword ptr [{dot} + 64*\\t]",
                "vpaddd ymm1\\t, ymm1\\t, ymmword ptr [{dot} + 64*\\t + 32]",
                "vmovdqa ymmword ptr [{dot} + 64*\\t], ymm\\t",
                "vmovdqa ymmword ptr [{dot} + 64*\\t + 32], ymm1\\t"
            ),
            "add {w}, 64 * {steps}", "add {a}, 16 * {steps}", "add {i}, 16", "jnz 2b";
            w = inout(reg) tile.q.as_ptr() => _, a = inout(reg) acts.q.as_ptr() => _, m = in(reg) end(acts, 16 * SUBS), s = in(reg) end(&tile.scales, 64 * SUBS),
            i = inout(reg) -16 * SUBS as isize => _, dot = in(reg) dot.as_mut_ptr(),
            nt = const NT, steps = const 64 / SUBS, shift = const F::SHIFT,
            minus_sum = const offset_of!(SuperActs, minus_sum), scale = const offset_of!(Scales, sub_scale)
        );
    }
    finish_super::<F, SUBS, NT>(&tile.scales, acts, dot, out);
}

#[target_feature(enable = "avx2,fma,f16c")]
pub fn word_blocks<const NT: usize>(tile: &Tile, acts: &WordActs, blocks: usize, out: &mut [[f32; 16]; NT]) {
    assert!(blocks <= acts.d.len());
    if blocks == 0 {
        return;
    }
    // SAFETY: reads `blocks` blocks of the tile and of the activations, which have eight, and reads and writes `out`; the registers are declared.
    unsafe {
        kernel!(
            ".p2align 5", "2:",
            steps!("1,2,3,4,5,6,7,8,9,10,11,12,13,14,15", "vpmaddwd", "vpaddd"),
            finish!(unpacked_scale!();),
            "add {w}, 64 * {steps}", "add {a}, 16 * {steps}", "add {i}, 16", "jnz 2b";
            w = inout(reg) tile.q.as_ptr() => _, a = inout(reg) acts.q.as_ptr() => _, m = in(reg) end(acts, 16 * blocks), s = in(reg) end(&tile.scales, 64 * blocks),
            i = inout(reg) -16 * blocks as isize => _, out = in(reg) out.as_mut_ptr(),
            nt = const NT, steps = const 16, shift = const 0, minus_sum = const 0,
            d = const offset_of!(WordActs, d), scale = const offset_of!(Scales, scale)
        );
    }
}
