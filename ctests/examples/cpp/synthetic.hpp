// A small GGUF file made in memory, for where there is no model at hand: one layer for every few encodings, random
// blocks with scales of the size that real weights have. The bytes go through the same reader as a real file.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "encodings.hpp"

namespace gguf {

class Writer {
public:
    template <class T>
    void number(T value) {
        append(&value, sizeof value);
    }
    void string(const std::string& text) {
        number<std::uint64_t>(text.size());
        append(text.data(), text.size());
    }
    void metadata(const std::string& key, std::uint32_t value) {
        string(key);
        number<std::uint32_t>(4);  // U32
        number(value);
    }
    void metadata(const std::string& key, float value) {
        string(key);
        number<std::uint32_t>(6);  // F32
        number(value);
    }
    void metadata(const std::string& key, const std::string& value) {
        string(key);
        number<std::uint32_t>(8);  // String
        string(value);
    }
    void append(const void* data, std::size_t size) {
        auto* start = static_cast<const std::uint8_t*>(data);
        bytes.insert(bytes.end(), start, start + size);
    }
    void pad(std::size_t alignment) { bytes.resize((bytes.size() + alignment - 1) / alignment * alignment); }

    std::vector<std::uint8_t> bytes;
};

inline std::uint16_t half_bits(double value) {  // of a value within F16's range; truncated, which is close enough here
    int exponent = std::max(std::ilogb(value), -14);  // subnormals share the exponent of the smallest normal numbers
    auto mantissa =
        static_cast<int>(std::ldexp(std::fabs(value), 10 - exponent));  // with the leading bit, if there is one
    int bits = mantissa < 1024 ? mantissa : (exponent + 15) << 10 | (mantissa & 1023);
    return static_cast<std::uint16_t>((value < 0 ? 0x8000 : 0) | bits);
}

// A block of random codes whose decoded elements are centred and of the order of `size`.
inline void random_block(const Encoding& encoding, double size, std::mt19937& random, std::uint8_t* block) {
    auto half = [&](unsigned at, double value) {
        std::uint16_t bits = half_bits(value);
        std::memcpy(block + at, &bits, 2);
    };
    double spread = std::uniform_real_distribution<>(0.5, 1.5)(random) * size;
    double normal = std::normal_distribution<>(0, size)(random);
    float plain = static_cast<float>(normal);
    for (unsigned i = 0; i < encoding.block_bytes; i++) block[i] = static_cast<std::uint8_t>(random());
    switch (encoding.id) {
        case 0: std::memcpy(block, &plain, 4); break;
        case 1: half(0, normal); break;
        case 30: std::memcpy(block, reinterpret_cast<const char*>(&plain) + 2, 2); break;
        case 2: half(0, spread / 4); break;
        case 3: half(0, spread / 4), half(2, -7.5 * spread / 4); break;
        case 6: half(0, spread / 8); break;
        case 7: half(0, spread / 8), half(2, -15.5 * spread / 8); break;
        case 8: half(0, spread / 64); break;
        case 20: half(0, spread / 64); break;
        case 39: block[0] = static_cast<std::uint8_t>(127 + std::ilogb(size) - 1 + random() % 2); break;
        case 10: half(80, spread / 8), half(82, 1.5 * spread / 8); break;  // codes 0..3, minimum in the middle
        case 11: half(108, spread / 32); break;
        case 12: half(0, spread / 128), half(2, 7.5 * spread / 128); break;   // codes 0..15
        case 13: half(0, spread / 256), half(2, 15.5 * spread / 256); break;  // codes 0..31
        case 14: half(208, spread / 1024); break;
        case 23: half(0, spread / 1024); break;
    }
}

inline std::vector<std::uint8_t> synthetic_file() {
    struct Layer {
        const char *q, *k, *v;
        bool biased, fused;  // fused: one attn_qkv tensor in the encoding of q
    };
    const Layer layers[] = {
        {"Q4_0", "Q4_0", "Q4_0", false, false}, {"Q4_K", "Q4_K", "Q6_K", false, false},
        {"Q5_0", "Q5_0", "Q8_0", true, false},  {"Q4_1", "Q5_1", "IQ4_NL", false, false},
        {"Q5_K", "Q3_K", "Q2_K", false, false}, {"IQ4_XS", "MXFP4", "Q5_K", false, false},
        {"Q8_0", "Q8_0", "Q8_0", true, true},   {"F16", "BF16", "F32", false, false},
    };
    constexpr std::uint32_t width = 512, heads = 4, kv_heads = 2, head_size = 128, vocabulary = 512, alignment = 32;
    constexpr std::uint32_t num_layers = sizeof layers / sizeof *layers;
    constexpr std::uint32_t q_rows = heads * head_size, kv_rows = kv_heads * head_size;

    struct Planned {
        std::string name;
        const Encoding* encoding;
        std::uint64_t cols, rows, offset;  // rows 0: a vector
        std::uint64_t blocks() const { return (rows ? rows : 1) * (cols / encoding->block_elements); }
    };
    std::vector<Planned> tensors;
    std::uint64_t end = 0;
    auto plan = [&](const std::string& name, const std::string& encoding_name, std::uint64_t cols, std::uint64_t rows) {
        for (const Encoding& encoding : encodings) {
            if (encoding_name != encoding.name) continue;
            tensors.push_back({name, &encoding, cols, rows, end});
            end += tensors.back().blocks() * encoding.block_bytes;
            end = (end + alignment - 1) / alignment * alignment;
        }
    };
    plan("token_embd.weight", "F16", width, vocabulary);
    for (std::uint32_t i = 0; i < num_layers; i++) {
        std::string prefix = "blk." + std::to_string(i) + ".attn_";
        auto projection = [&](const std::string& name, const char* encoding, std::uint64_t rows) {
            if (layers[i].biased) plan(prefix + name + ".bias", "F32", rows, 0);
            plan(prefix + name + ".weight", encoding, width, rows);
        };
        plan(prefix + "norm.weight", "F32", width, 0);
        if (layers[i].fused) {
            projection("qkv", layers[i].q, q_rows + 2 * kv_rows);
        } else {
            projection("q", layers[i].q, q_rows);
            projection("k", layers[i].k, kv_rows);
            projection("v", layers[i].v, kv_rows);
        }
    }

    Writer file;
    file.append("GGUF", 4);
    file.number<std::uint32_t>(3);
    file.number<std::uint64_t>(tensors.size());
    file.number<std::uint64_t>(9);
    file.metadata("general.architecture", std::string("llama"));
    file.metadata("general.name", std::string("synthetic, random weights"));
    file.metadata("general.alignment", alignment);
    file.metadata("llama.block_count", num_layers);
    file.metadata("llama.embedding_length", width);
    file.metadata("llama.attention.head_count", heads);
    file.metadata("llama.attention.head_count_kv", kv_heads);
    file.metadata("llama.attention.key_length", head_size);
    file.metadata("llama.attention.layer_norm_rms_epsilon", 1e-6f);
    for (const Planned& tensor : tensors) {
        file.string(tensor.name);
        file.number<std::uint32_t>(tensor.rows ? 2 : 1);
        file.number<std::uint64_t>(tensor.cols);
        if (tensor.rows) file.number<std::uint64_t>(tensor.rows);
        file.number<std::uint32_t>(tensor.encoding->id);
        file.number<std::uint64_t>(tensor.offset);
    }
    file.pad(alignment);

    std::mt19937 random(20);
    std::vector<std::uint8_t> block;
    for (const Planned& tensor : tensors) {
        block.resize(tensor.encoding->block_bytes);
        for (std::uint64_t i = 0; i < tensor.blocks(); i++) {
            random_block(*tensor.encoding, tensor.rows ? 0.02 : 1, random, block.data());
            file.append(block.data(), block.size());
        }
        file.pad(alignment);
    }
    return file.bytes;
}

}  // namespace gguf
