//! Text that the kernels in assembly share. Register `ymm<t>` holds token t's sums of rows 0 to 7, `ymm1<t>` those of rows 8 to 15; 4 and 5 are free.

/// The lines once for each token `\t`.
macro_rules! tokens {
    ($($line:expr),*) => {
        concat!(".irp t,0,1,2,3\n.if \\t < {nt}\n", $($line, "\n",)* ".endif\n.endr")
    };
}

/// The first product of a sum, of activations at `a` with the vectors `w0` and `w1`: the sums start at what lies at `start`, times the weights' offset
/// `2^shift`, or without an offset at zero.
macro_rules! first {
    ($mul:literal, $add:literal, $w0:literal, $w1:literal, $a:expr, $start:expr) => {
        tokens!(
            concat!("vpbroadcastd ymm4, dword ptr [{a} + ", $a, " + 4*\\t]"),
            concat!($mul, " ymm\\t, ", $w0, ", ymm4"),
            concat!($mul, " ymm1\\t, ", $w1, ", ymm4"),
            ".if {shift}",
            concat!("vpbroadcastd ymm4, dword ptr [", $start, " + 4*\\t]"),
            "vpsllw ymm4, ymm4, {shift}",
            concat!($add, " ymm\\t, ymm\\t, ymm4"),
            concat!($add, " ymm1\\t, ymm1\\t, ymm4"),
            ".endif"
        )
    };
}

/// A further product.
macro_rules! further {
    ($mul:literal, $add:literal, $w0:expr, $w1:expr, $a:expr) => {
        tokens!(
            concat!("vpbroadcastd ymm4, dword ptr [{a} + ", $a, " + 4*\\t]"),
            concat!($mul, " ymm5, ", $w0, ", ymm4"),
            concat!($mul, " ymm4, ", $w1, ", ymm4"),
            concat!($add, " ymm\\t, ymm\\t, ymm5"),
            concat!($add, " ymm1\\t, ymm1\\t, ymm4")
        )
    };
}

/// The weights' scales, unpacked before.
macro_rules! unpacked_scale {
    () => {
        concat!(
            "vmovaps ymm8, ymmword ptr [{s} + 4*{i} + {scale}]\n",
            "vmovaps ymm9, ymmword ptr [{s} + 4*{i} + {scale} + 32]\n",
        )
    };
}

/// `out += sum * (scale_w * scale_a)`, the sums 32-bit integers, and what `more` says; `scale` brings the weights' scales to 8 and 9.
macro_rules! finish {
    ($scale:expr; $($more:expr),*) => {
        concat!(
            $scale,
            tokens!(
                "vbroadcastss ymm4, dword ptr [{m} + {i} + {d} + 4*\\t]",
                "vcvtdq2ps ymm\\t, ymm\\t",
                "vcvtdq2ps ymm1\\t, ymm1\\t",
                "vmulps ymm5, ymm8, ymm4",
                "vmulps ymm6, ymm9, ymm4",
                "vfmadd213ps ymm\\t, ymm5, ymmword ptr [{out} + 64*\\t]",
                "vfmadd213ps ymm1\\t, ymm6, ymmword ptr [{out} + 64*\\t + 32]",
                $($more,)*
                "vmovups ymmword ptr [{out} + 64*\\t], ymm\\t",
                "vmovups ymmword ptr [{out} + 64*\\t + 32], ymm1\\t"
            ),
        )
    };
}

/// For [`finish`]: the weights' mins times the activations' sums.
macro_rules! add_min {
    () => {
        concat!(
            ".if {min}\n",
            "vbroadcastss ymm4, dword ptr [{m} + {i} + {sum} + 4*\\t]\n",
            "vfmadd231ps ymm\\t, ymm4, ymmword ptr [{s} + 4*{i} + {mins}]\n",
            "vfmadd231ps ymm1\\t, ymm4, ymmword ptr [{s} + 4*{i} + {mins} + 32]\n",
            ".endif",
        )
    };
}

/// So many bytes on: what an index that counts up to zero is added to.
pub fn end<T>(x: &T, bytes: usize) -> *const u8 {
    std::ptr::from_ref(x).cast::<u8>().wrapping_add(bytes)
}

/// Assembly of which all vector registers are its own.
macro_rules! kernel {
    ($($line:expr),*; $($operand:tt)*) => {
        asm!($($line,)* $($operand)*,
            out("ymm0") _, out("ymm1") _, out("ymm2") _, out("ymm3") _, out("ymm4") _, out("ymm5") _, out("ymm6") _, out("ymm7") _,
            out("ymm8") _, out("ymm9") _, out("ymm10") _, out("ymm11") _, out("ymm12") _, out("ymm13") _, out("ymm14") _, out("ymm15") _,
            options(nostack))
    };
}
