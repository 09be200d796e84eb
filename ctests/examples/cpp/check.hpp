// The yardstick: the product of the same hidden states with the dequantised weights in double precision, and beside it
// the error that ideal 8-bit activations make: exact arithmetic on codes rounded to nearest.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <vector>

#include "gguf.hpp"

struct Errors {
    double library = 0;  // |library - exact| / |exact|, Frobenius norms over every token and the rows looked at
    double ideal = 0;    // the same for exact arithmetic on activations rounded to 8 bits; 0 for float weights
    double bound = 0;    // what the library promises
    bool within() const { return library <= bound; }  // false for NaN
};

// Hidden states of all tokens in double precision, in tiles of tokens: the product below runs over whole vectors.
class Activations {
public:
    static constexpr std::size_t tile = 16;

    Activations(const std::vector<float>& hidden, std::size_t columns)
        : tokens(hidden.size() / columns), width(columns), exact(transpose(hidden)) {
        for (std::size_t block : {32, 256})
            if (width % block == 0) (block == 32 ? rounding32 : rounding256) = transpose(rounding(hidden, block));
    }

    const std::vector<double>& rounding_of(std::size_t block) const { return block == 32 ? rounding32 : rounding256; }

    const std::size_t tokens, width;
    const std::vector<double> exact;  // [token tile][column][tile]

private:
    template <class T>
    std::vector<double> transpose(const std::vector<T>& rows) const {
        std::vector<double> out((tokens + tile - 1) / tile * tile * width);
        for (std::size_t t = 0; t < tokens; t++)
            for (std::size_t k = 0; k < width; k++)
                out[(t / tile * width + k) * tile + t % tile] = static_cast<double>(rows[t * width + k]);
        return out;
    }

    // Rounded minus exact, for symmetric round-to-nearest codes -127..127 and one scale for each block of columns.
    std::vector<double> rounding(const std::vector<float>& hidden, std::size_t block) const {
        std::vector<double> out(hidden.size());
        for (std::size_t start = 0; start < hidden.size(); start += block) {
            double largest = 0;
            for (std::size_t i = start; i < start + block; i++)
                largest = std::max(largest, std::fabs(double{hidden[i]}));
            double scale = largest / 127;
            for (std::size_t i = start; i < start + block && scale > 0; i++)
                out[i] = std::nearbyint(hidden[i] / scale) * scale - hidden[i];
        }
        return out;
    }

    std::vector<double> rounding32, rounding256;
};

// Compares `got` ([tokens, weight.rows], what the library computed) with the yardstick, on evenly spaced rows of a
// large matrix. `storage_rounding` is the relative rounding of the type that the result was kept in (0 for F32).
inline Errors compare(const gguf::Matrix& weight, const std::vector<float>& bias, const Activations& x,
                      const std::vector<float>& got, bool exact_compute, double storage_rounding) {
    constexpr std::size_t tile = Activations::tile;
    constexpr double products = 1 << 27;  // as many products as a matrix is worth: keeps large models quick
    const auto enough = static_cast<std::size_t>(products / static_cast<double>(x.width * x.tokens));
    const std::size_t step = (weight.rows + std::max<std::size_t>(enough, 64) - 1) / std::max<std::size_t>(enough, 64);
    const bool rounds = weight.encoding->activation_block != 0;

    std::vector<double> row(x.width);
    double norm = 0, library = 0, ideal = 0;
    for (std::size_t r = 0; r < weight.rows; r += step) {
        gguf::decode_row(*weight.encoding, weight.data + r * weight.row_bytes, x.width, row.data());
        for (std::size_t first = 0; first < x.tokens; first += tile) {
            double exact[tile] = {}, error[tile] = {};
            const double* columns = x.exact.data() + first * x.width;
            const double* rounding =
                rounds ? x.rounding_of(weight.encoding->activation_block).data() + first * x.width : columns;
            for (std::size_t k = 0; k < x.width; k++)
                for (std::size_t t = 0; t < tile; t++) {
                    exact[t] += row[k] * columns[k * tile + t];
                    error[t] += row[k] * rounding[k * tile + t];
                }
            for (std::size_t t = 0; t < tile && first + t < x.tokens; t++) {
                double y = exact[t] + (bias.empty() ? 0 : double{bias[r]});
                if (!(std::fabs(y) <= FLT_MAX))
                    throw gguf::Error("tensor " + gguf::File::quoted(weight.name) +
                                      " gives results beyond F32: a damaged file");
                double difference = got[(first + t) * weight.rows + r] - y;
                norm += y * y;
                library += difference * difference;
                ideal += error[t] * error[t];
            }
        }
    }
    if (norm == 0) norm = 1;  // an all-zero matrix: errors are absolute
    Errors errors;
    errors.library = std::sqrt(library / norm);
    errors.ideal = rounds ? std::sqrt(ideal / norm) : 0;
    errors.bound = (rounds && !exact_compute ? 1.1 * errors.ideal : 1e-5) + storage_rounding;
    return errors;
}
