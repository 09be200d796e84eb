// bf16 and fp8 (e4m3fn) on the host, in plain arithmetic.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

// Round to nearest, ties to even. Finite input.
inline std::uint16_t to_bf16(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return static_cast<std::uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline float from_bf16(std::uint16_t half) {
    std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline double round_bf16(double value) { return from_bf16(to_bf16(static_cast<float>(value))); }

inline std::vector<std::uint16_t> to_bf16(const std::vector<float>& values) {
    std::vector<std::uint16_t> out(values.size());
    std::transform(values.begin(), values.end(), out.begin(), [](float value) { return to_bf16(value); });
    return out;
}

// Sign, four exponent bits (bias 7), three mantissa bits; saturates at 448, the largest finite number.
inline std::uint8_t to_e4m3(double value) {
    double magnitude = std::min(std::fabs(value), 448.0);
    int exponent = magnitude > 0 ? std::max(std::ilogb(magnitude), -6) : -6;
    int mantissa = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));  // 8..16; subnormal: 0..8
    // A mantissa of 8 counts as one in the exponent field, so 16 carries into the next exponent by itself.
    int bits = mantissa < 8 ? mantissa : ((exponent + 6) << 3) + mantissa;
    return static_cast<std::uint8_t>(bits | (std::signbit(value) ? 0x80 : 0));
}

inline double from_e4m3(std::uint8_t bits) {
    int exponent = bits >> 3 & 15, mantissa = bits & 7;
    double magnitude = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
    return bits & 0x80 ? -magnitude : magnitude;
}
