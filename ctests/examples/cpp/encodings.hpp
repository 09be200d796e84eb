// GGUF's block encodings, decoded element by element in double precision, written for clarity and apart from the
// library, so that the example's check does not share a decoder with what it checks.
//
// A row is a whole number of blocks. `decode(block, i)` is element i of a block; block layouts are GGUF's public ones.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>

namespace gguf {

using Block = const std::uint8_t*;

struct Encoding {
    std::uint32_t id;  // GGUF's type number, which is also the library's
    const char* name;
    std::uint32_t block_elements, block_bytes;
    double (*decode)(Block block, unsigned i);
    std::uint32_t activation_block;  // elements that share one scale where activations are taken in 8 bits; 0: never
};

namespace detail {

inline std::uint16_t u16(Block p) { return static_cast<std::uint16_t>(p[0] | p[1] << 8); }
inline std::uint32_t u32(Block p) { return u16(p) | static_cast<std::uint32_t>(u16(p + 2)) << 16; }
inline double f32(Block p) {
    float value;
    std::memcpy(&value, p, sizeof value);
    return value;
}
inline double bf16(Block p) {
    std::uint32_t bits = static_cast<std::uint32_t>(u16(p)) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
inline double f16(Block p) {
    unsigned bits = u16(p), exponent = bits >> 10 & 31, mantissa = bits & 1023;
    double magnitude = exponent == 0    ? std::ldexp(mantissa, -24)
                       : exponent == 31 ? (mantissa ? NAN : INFINITY)
                                        : std::ldexp(mantissa + 1024, static_cast<int>(exponent) - 25);
    return bits & 0x8000 ? -magnitude : magnitude;
}

// Blocks of 32 keep element i and element i + 16 in the low and high half of byte i.
inline int nibble(Block q, unsigned i) { return i < 16 ? q[i] & 15 : q[i - 16] >> 4; }
inline int bit(std::uint32_t bits, unsigned i) { return bits >> i & 1; }

inline double q4_0(Block b, unsigned i) { return f16(b) * (nibble(b + 2, i) - 8); }
inline double q4_1(Block b, unsigned i) { return f16(b) * nibble(b + 4, i) + f16(b + 2); }
inline double q5_0(Block b, unsigned i) { return f16(b) * ((nibble(b + 6, i) | bit(u32(b + 2), i) << 4) - 16); }
inline double q5_1(Block b, unsigned i) {
    return f16(b) * (nibble(b + 8, i) | bit(u32(b + 4), i) << 4) + f16(b + 2);
}
inline double q8_0(Block b, unsigned i) { return f16(b) * static_cast<std::int8_t>(b[2 + i]); }

constexpr int nonlinear4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
inline double iq4_nl(Block b, unsigned i) { return f16(b) * nonlinear4[nibble(b + 2, i)]; }

constexpr double fp4[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
inline double mxfp4(Block b, unsigned i) {
    int code = nibble(b + 1, i);
    double magnitude = std::ldexp(fp4[code & 7], b[0] - 127);
    return code & 8 ? -magnitude : magnitude;
}

// Blocks of 256. Where codes take two bits, the four fields of a byte are 32 elements apart.
inline int two_bits(Block q, unsigned i) { return q[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3; }
// Where they take four, the halves of a byte are 32 elements apart.
inline int four_bits(Block q, unsigned i) { return q[i / 64 * 32 + i % 32] >> (i % 64 / 32 * 4) & 15; }

inline double q2_k(Block b, unsigned i) {  // scales[16], qs[64], d, dmin
    int scale = b[i / 16];
    return f16(b + 80) * (scale & 15) * two_bits(b + 16, i) - f16(b + 82) * (scale >> 4);
}
inline double q3_k(Block b, unsigned i) {  // hmask[32], qs[64], scales[12], d
    unsigned s = i / 16;
    Block scales = b + 96;
    int low = s < 8 ? scales[s] & 15 : scales[s - 8] >> 4;
    int high = scales[8 + s % 4] >> (s / 4 * 2) & 3;
    int code = two_bits(b + 32, i) - (bit(b[i % 32], i / 32) ? 0 : 4);
    return f16(b + 108) * ((low | high << 4) - 32) * code;
}
// Q4_K and Q5_K: eight 6-bit scales and eight 6-bit minimums in twelve bytes.
inline int scale6(Block s, unsigned g) { return g < 4 ? s[g] & 63 : (s[g + 4] & 15) | s[g - 4] >> 6 << 4; }
inline int min6(Block s, unsigned g) { return g < 4 ? s[g + 4] & 63 : s[g + 4] >> 4 | s[g] >> 6 << 4; }
inline double q4_k(Block b, unsigned i) {  // d, dmin, scales[12], qs[128]
    unsigned g = i / 32;
    return f16(b) * scale6(b + 4, g) * four_bits(b + 16, i) - f16(b + 2) * min6(b + 4, g);
}
inline double q5_k(Block b, unsigned i) {  // d, dmin, scales[12], qh[32], qs[128]
    unsigned g = i / 32;
    int code = four_bits(b + 48, i) | bit(b[16 + i % 32], g) << 4;
    return f16(b) * scale6(b + 4, g) * code - f16(b + 2) * min6(b + 4, g);
}
inline double q6_k(Block b, unsigned i) {  // ql[128], qh[64], scales[16], d
    unsigned half = i / 128, quarter = i % 128 / 32;
    int low = b[half * 64 + quarter % 2 * 32 + i % 32] >> (quarter / 2 * 4) & 15;
    int code = (low | two_bits(b + 128, i) << 4) - 32;
    return f16(b + 208) * static_cast<std::int8_t>(b[192 + i / 16]) * code;
}
inline double iq4_xs(Block b, unsigned i) {  // d, scales_h, scales_l[4], qs[128]
    unsigned g = i / 32;
    int scale = (b[4 + g / 2] >> (g % 2 * 4) & 15) | (u16(b + 2) >> (2 * g) & 3) << 4;
    return f16(b) * (scale - 32) * nonlinear4[nibble(b + 8 + 16 * g, i % 32)];
}

inline double f32_element(Block b, unsigned) { return f32(b); }
inline double f16_element(Block b, unsigned) { return f16(b); }
inline double bf16_element(Block b, unsigned) { return bf16(b); }

}  // namespace detail

inline constexpr Encoding encodings[] = {
    {0, "F32", 1, 4, detail::f32_element, 0},
    {1, "F16", 1, 2, detail::f16_element, 0},
    {30, "BF16", 1, 2, detail::bf16_element, 0},
    {2, "Q4_0", 32, 18, detail::q4_0, 32},
    {3, "Q4_1", 32, 20, detail::q4_1, 32},
    {6, "Q5_0", 32, 22, detail::q5_0, 32},
    {7, "Q5_1", 32, 24, detail::q5_1, 32},
    {8, "Q8_0", 32, 34, detail::q8_0, 32},
    {20, "IQ4_NL", 32, 18, detail::iq4_nl, 32},
    {39, "MXFP4", 32, 17, detail::mxfp4, 32},
    {10, "Q2_K", 256, 84, detail::q2_k, 256},
    {11, "Q3_K", 256, 110, detail::q3_k, 256},
    {12, "Q4_K", 256, 144, detail::q4_k, 256},
    {13, "Q5_K", 256, 176, detail::q5_k, 256},
    {14, "Q6_K", 256, 210, detail::q6_k, 256},
    {23, "IQ4_XS", 256, 136, detail::iq4_xs, 256},
};

inline const Encoding* find_encoding(std::uint32_t id) {
    for (const Encoding& encoding : encodings)
        if (encoding.id == id) return &encoding;
    return nullptr;
}

inline std::string encoding_name(std::uint32_t id) {
    if (const Encoding* encoding = find_encoding(id)) return encoding->name;
    switch (id) {  // encodings of real files that a message should be able to name
        case 9: return "Q8_1";
        case 15: return "Q8_K";
        case 16: return "IQ2_XXS";
        case 17: return "IQ2_XS";
        case 18: return "IQ3_XXS";
        case 19: return "IQ1_S";
        case 21: return "IQ3_S";
        case 22: return "IQ2_S";
        case 29: return "IQ1_M";
        case 34: return "TQ1_0";
        case 35: return "TQ2_0";
        default: return "type " + std::to_string(id);
    }
}

inline std::string supported_encodings() {
    std::string list;
    for (const Encoding& encoding : encodings) list += (list.empty() ? "" : ", ") + std::string(encoding.name);
    return list;
}

// One row, to doubles.
inline void decode_row(const Encoding& encoding, Block row, std::size_t cols, double* out) {
    for (std::size_t k = 0; k < cols; k += encoding.block_elements, row += encoding.block_bytes)
        for (unsigned i = 0; i < encoding.block_elements; i++) out[k + i] = encoding.decode(row, i);
}

}  // namespace gguf
