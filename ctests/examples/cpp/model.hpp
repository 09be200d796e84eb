// What the attention projections need of a GGUF model: the Q, K and V weights of every layer, the norm before them, and
// token embeddings to feed them with.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "gguf.hpp"

struct Layer {
    std::size_t number = 0;  // N of the file's blk.N
    gguf::Matrix q, k, v;    // [num_heads * head_size, width], [num_kv_heads * head_size, width] twice
    std::vector<float> q_bias, k_bias, v_bias;  // empty where there is none
    std::vector<float> norm;                    // RMS norm weight; empty in models that norm after the projection
};

struct Model {
    std::string architecture;
    std::size_t width = 0, num_heads = 0, num_kv_heads = 0, head_size = 0, block_count = 0;
    double epsilon = 1e-5;
    gguf::Matrix embeddings;  // [vocabulary, width]
    std::vector<Layer> layers;

    explicit Model(const gguf::File& file) {
        architecture = file.string("general.architecture");
        auto key = [&](const char* name) { return architecture + "." + name; };
        width = file.need_unsigned(key("embedding_length"));
        block_count = file.need_unsigned(key("block_count"));
        epsilon = file.find_real(key("attention.layer_norm_rms_epsilon")).value_or(epsilon);
        if (!(epsilon >= 0 && epsilon < 1))
            throw gguf::Error(key("attention.layer_norm_rms_epsilon") + " is out of range");
        embeddings = file.matrix("token_embd.weight");
        if (width == 0 || embeddings.cols != width)
            throw gguf::Error("token_embd.weight has rows of " + std::to_string(embeddings.cols) + " elements, but " +
                              key("embedding_length") + " is " + std::to_string(width));

        std::size_t missing = 0;
        for (std::size_t n = 0; n < block_count; n++) {
            std::string prefix = "blk." + std::to_string(n) + ".";
            // Hybrid models have layers without attention. Past a thousand of them the count itself is nonsense.
            if (!file.has(prefix + "attn_q.weight") && !file.has(prefix + "attn_qkv.weight")) {
                if (++missing > 1000) break;
                continue;
            }
            add_layer(file, n, prefix);
        }
        if (layers.empty())
            throw gguf::Error("no layer has attn_q/attn_k/attn_v or attn_qkv weights (architecture " +
                              gguf::File::quoted(architecture) + ")");
    }

    // Hidden states as the layer's projections see them: embeddings, RMS-normed with its weight. [tokens, width]
    std::vector<float> hidden_states(const Layer& layer, const std::vector<std::uint32_t>& tokens) const {
        std::vector<float> hidden(tokens.size() * width);
        std::vector<double> row(width);
        for (std::size_t t = 0; t < tokens.size(); t++) {
            gguf::decode_row(*embeddings.encoding, embeddings.data + tokens[t] * embeddings.row_bytes, width,
                             row.data());
            double squares = 0;
            for (double x : row) squares += x * x;
            double scale = 1 / std::sqrt(squares / static_cast<double>(width) + epsilon);
            for (std::size_t i = 0; i < width; i++) {
                double x = row[i] * scale * (layer.norm.empty() ? 1.0 : layer.norm[i]);
                if (!(std::fabs(x) < 1e30))
                    throw gguf::Error(
                        "embeddings or norm weights hold values that are not sensible numbers: a damaged file");
                hidden[t * width + i] = static_cast<float>(x);
            }
        }
        return hidden;
    }

private:
    void add_layer(const gguf::File& file, std::size_t n, const std::string& prefix) {
        auto heads = file.need_unsigned(architecture + ".attention.head_count", n);
        auto kv_heads = file.find_unsigned(architecture + ".attention.head_count_kv", n).value_or(heads);
        if (heads == 0 || kv_heads == 0) throw gguf::Error(prefix + "attn has no heads");
        auto size = file.unsigned_or(architecture + ".attention.key_length", width / heads);
        if (file.unsigned_or(architecture + ".attention.value_length", size) != size)
            throw gguf::Error("keys and values have heads of different sizes, which one collection does not hold");
        if (layers.empty()) {
            num_heads = heads, num_kv_heads = kv_heads, head_size = size;
        } else if (heads != num_heads || kv_heads != num_kv_heads) {
            throw gguf::Error("layer " + std::to_string(n) +
                              " has other head counts than the layers before it, which one "
                              "collection does not hold");
        }
        auto q_rows = gguf::multiply(heads, size, "the number of query rows");
        auto kv_rows = gguf::multiply(kv_heads, size, "the number of key rows");

        Layer layer;
        layer.number = n;
        if (file.has(prefix + "attn_qkv.weight")) {  // one matrix: the rows of Q, then of K, then of V
            gguf::Matrix fused = file.matrix(prefix + "attn_qkv.weight");
            if (kv_rows > fused.rows || q_rows > fused.rows || fused.rows != q_rows + 2 * kv_rows)
                shape_error(fused, q_rows);
            layer.q = fused.slice(0, q_rows);
            layer.k = fused.slice(q_rows, kv_rows);
            layer.v = fused.slice(q_rows + kv_rows, kv_rows);
            if (file.has(prefix + "attn_qkv.bias")) {
                auto bias = file.vector(prefix + "attn_qkv.bias", fused.rows);
                layer.q_bias.assign(bias.begin(), bias.begin() + static_cast<std::ptrdiff_t>(q_rows));
                layer.k_bias.assign(bias.begin() + static_cast<std::ptrdiff_t>(q_rows),
                                    bias.end() - static_cast<std::ptrdiff_t>(kv_rows));
                layer.v_bias.assign(bias.end() - static_cast<std::ptrdiff_t>(kv_rows), bias.end());
            }
        } else {
            layer.q = file.matrix(prefix + "attn_q.weight");
            layer.k = file.matrix(prefix + "attn_k.weight");
            layer.v = file.matrix(prefix + "attn_v.weight");
            auto bias = [&](const char* name, std::size_t rows) {
                return file.has(prefix + name) ? file.vector(prefix + name, rows) : std::vector<float>();
            };
            layer.q_bias = bias("attn_q.bias", layer.q.rows);
            layer.k_bias = bias("attn_k.bias", layer.k.rows);
            layer.v_bias = bias("attn_v.bias", layer.v.rows);
        }
        for (const gguf::Matrix* m : {&layer.q, &layer.k, &layer.v})
            if (m->cols != width || m->rows != (m == &layer.q ? q_rows : kv_rows))
                shape_error(*m, m == &layer.q ? q_rows : kv_rows);
        if (file.has(prefix + "attn_norm.weight")) layer.norm = file.vector(prefix + "attn_norm.weight", width);
        layers.push_back(std::move(layer));
    }

    [[noreturn]] void shape_error(const gguf::Matrix& m, std::size_t rows) const {
        throw gguf::Error("tensor " + gguf::File::quoted(m.name) + " is " + std::to_string(m.rows) + " x " +
                          std::to_string(m.cols) + ", but the metadata (" + std::to_string(num_heads) + " heads, " +
                          std::to_string(num_kv_heads) + " key heads of " + std::to_string(head_size) + ") asks for " +
                          std::to_string(rows) + " x " + std::to_string(width));
    }
};

// Token ids of a text, at least `count` of them: the longest vocabulary entry that matches, again and again. Not the
// model's own tokeniser, but its own tokens. A file without a vocabulary gets ids spread over the embedding table.
inline std::vector<std::uint32_t> tokenize(const gguf::File& file, std::string_view text, std::size_t vocabulary,
                                           std::size_t count) {
    std::unordered_map<std::string_view, std::uint32_t> ids;
    if (const gguf::Value* value = file.find("tokenizer.ggml.tokens")) {
        if (auto* array = std::get_if<gguf::Array>(value); array && array->type == gguf::Type::String) {
            gguf::Cursor cursor(array->data, array->size);
            for (std::uint64_t i = 0; i < array->count && i < vocabulary; i++)
                ids.emplace(cursor.string("a token"), static_cast<std::uint32_t>(i));
        }
    }
    const std::string space = ids.count("\u2581the") ? "\u2581" : ids.count("\u0120the") ? "\u0120" : " ";
    std::string spelled;
    for (char c : text) c == ' ' ? spelled += space : spelled += c;

    std::vector<std::uint32_t> tokens;
    std::string_view rest = spelled;
    while (!rest.empty()) {
        std::size_t length = std::min<std::size_t>(rest.size(), 48);
        while (length > 0 && !ids.count(rest.substr(0, length))) length--;
        if (length > 0) tokens.push_back(ids[rest.substr(0, length)]);
        rest.remove_prefix(std::max<std::size_t>(length, 1));
    }
    for (std::uint64_t i = tokens.size(); i < count; i++)
        tokens.push_back(static_cast<std::uint32_t>(i * 2654435761u % vocabulary));
    return tokens;
}
