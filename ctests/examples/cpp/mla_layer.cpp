// One attention layer of the shape of DeepSeek-V3.2 on pagedkv: cache write, sparse indexer, and a prefill in two
// chunks that are merged and compared with a prefill in one go. Weights and activations are random; the shapes are the
// model's.
//
//   cargo build --release
//   c++ -std=c++17 -O2 -I include ctests/examples/cpp/mla_layer.cpp target/release/libpagedkv.a -ldl -o mla_layer
//   ./mla_layer [--heads 16] [--threads 0] [--cache fp8|bf16]
//
// 16 heads are one of eight tensor-parallel ranks; --heads 128 is the whole layer. Two collections, one for the latent
// rows and one for the indexer's keys, share a page table, as in an engine. Exit status: 0 all checks hold, 1 one does
// not, 2 bad options, 3 a call failed.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "floats.hpp"
#include "pkv.hpp"

namespace {

// DeepSeek-V3.2, per head and per token.
constexpr std::size_t nope = 128, rope = 64, value_size = 128, query_size = nope + rope;
constexpr std::size_t latent = 512, row_size = latent + rope;  // what the cache holds of a token, for all heads
constexpr std::size_t index_heads = 64, index_depth = 128, top_k = 2048;
constexpr float epsilon = 1e-6f;
constexpr std::uint32_t page_size = 64;

struct Options {
    std::size_t heads = 16;
    std::uint32_t threads = 0;
    bool fp8_cache = true;
};

// A sequence: tokens cached by earlier steps, and tokens new in this one.
struct Sequence {
    std::uint32_t cached, fresh;
    std::vector<std::uint32_t> pages;
    std::uint32_t length() const { return cached + fresh; }
};

std::mt19937 generator(32);

std::vector<float> normal(std::size_t count, double deviation = 1) {
    std::normal_distribution<double> distribution(0, deviation);
    std::vector<float> values(count);
    for (float& value : values) value = static_cast<float>(distribution(generator));
    return values;
}

template <class Function>
double best_seconds(Function&& function) {
    double best = 1e30;
    for (int run = 0; run < 3 && (run == 0 || best < 0.5); run++) {
        auto start = std::chrono::steady_clock::now();
        function();
        best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    return best;
}

// cos and sin of position x frequency, in pairs. [positions, rope]
std::vector<float> rope_table(std::size_t positions) {
    std::vector<float> table;
    for (std::size_t p = 0; p < positions; p++)
        for (std::size_t i = 0; i < rope / 2; i++) {
            double angle = static_cast<double>(p) * std::pow(10000.0, -2.0 * static_cast<double>(i) / rope);
            table.push_back(static_cast<float>(std::cos(angle)));
            table.push_back(static_cast<float>(std::sin(angle)));
        }
    return table;
}

// The up-projection from latent rows to every head's K and V, in fp8 with a scale for each 128 x 128 block.
struct UpProjection {
    std::size_t rows;
    std::vector<std::uint8_t> codes;  // [heads * (nope + value_size), latent]
    std::vector<float> scales;        // [rows / 128, latent / 128]

    explicit UpProjection(std::size_t heads) : rows(heads * (nope + value_size)) {
        for (float value : normal(rows * latent, 60)) codes.push_back(to_e4m3(value));
        std::uniform_real_distribution<float> around(0.5f, 1.5f);
        for (std::size_t i = 0; i < rows / 128 * (latent / 128); i++)
            scales.push_back(around(generator) / 60 / std::sqrt(static_cast<float>(latent)));
    }
    double at(std::size_t n, std::size_t c) const {
        return from_e4m3(codes[n * latent + c]) * scales[n / 128 * (latent / 128) + c / 128];
    }
};

struct Layer {
    const Options& options;
    const pkv::Context& context;
    std::vector<Sequence>& sequences;
    pkv::Collection latents, index_keys;
    std::vector<float> freqs_cis, gamma;
    UpProjection up;
    pkv::Workspace workspace;

    std::uint32_t max_pages() const {
        std::size_t most = 0;
        for (const Sequence& sequence : sequences) most = std::max(most, sequence.pages.size());
        return static_cast<std::uint32_t>(most);
    }

    // Runs a kernel: ask what scratch it needs, then call it.
    template <class Query, class Kernel, class Params>
    void run(const char* name, Query query, Kernel kernel, const Params& params) {
        std::size_t bytes = 0;
        pkv::call(name, query, context.get(), &params, &bytes);
        workspace.reserve(bytes);
        pkv::call(name, kernel, context.get(), pkv::no_stream, &params, workspace.buffer());
    }

    // Ropes the tail of every query in place; norms, ropes and (fp8) quantises the new rows into the latent cache.
    void write_cache(const pkv_batch& batch, std::vector<std::uint16_t>& q, const std::vector<std::uint16_t>& kv) {
        const std::size_t tokens = kv.size() / row_size;
        auto params = pkv::make<pkv_mla_rope_rmsnorm_quantize_params>();
        params.collection = latents.get();
        params.batch = &batch;
        params.rope = PKV_ROPE_INTERLEAVED;
        params.q_rope = pkv::tensor(q.data() + nope, PKV_BF16, {tokens, options.heads, rope});
        params.q_rope.stride[0] = static_cast<std::int64_t>(options.heads * query_size);
        params.q_rope.stride[1] = query_size;
        params.q_rope.stride[2] = 1;
        params.q_rope_output = params.q_rope;
        params.kv = pkv::tensor(kv.data(), PKV_BF16, {tokens, row_size});
        params.freqs_cis = pkv::tensor(freqs_cis, {freqs_cis.size() / rope, rope});
        params.gamma = pkv::tensor(gamma, {latent});
        params.epsilon = epsilon;
        run("pkv_mla_rope_rmsnorm_quantize", pkv_mla_rope_rmsnorm_quantize_workspace_size,
            pkv_mla_rope_rmsnorm_quantize, params);
    }

    // Quantises the new tokens' indexer keys into their cache.
    void store_index_keys(const pkv_batch& batch, const std::vector<float>& keys) {
        auto params = pkv::make<pkv_kv_store_params>();
        params.collection = index_keys.get();
        params.batch = &batch;
        params.values = pkv::tensor(keys, {keys.size() / index_depth, 1, index_depth});
        run("pkv_kv_store", pkv_kv_store_workspace_size, pkv_kv_store, params);
    }

    void select_keys(const pkv_batch& batch, const std::vector<std::uint8_t>& q, const std::vector<float>& q_s,
                     std::vector<std::int32_t>& indices, std::vector<float>& scores) {
        const std::size_t tokens = q_s.size() / index_heads;
        auto params = pkv::make<pkv_mla_indexer_fp8_params>();
        params.collection = index_keys.get();
        params.batch = &batch;
        params.mask = PKV_MASK_CAUSAL;
        params.top_k = top_k;
        params.q = pkv::tensor(q.data(), PKV_F8_E4M3, {tokens, index_heads, index_depth});
        params.q_s = pkv::tensor(q_s, {tokens, index_heads});
        params.output_indices = pkv::tensor(indices, {tokens, top_k});
        params.output_scores = pkv::tensor(scores, {tokens, top_k});
        run("pkv_mla_indexer_fp8", pkv_mla_indexer_fp8_workspace_size, pkv_mla_indexer_fp8, params);
    }

    // Attention of the new tokens over cached rows [offsets[b], offsets[b] + counts[b]) of each sequence.
    struct Part {
        std::vector<std::uint16_t> output;  // [tokens, heads, value_size]
        std::vector<float> lse;             // [tokens, heads]
    };
    void prefill(const pkv_batch& batch, std::vector<std::uint16_t>& q, const std::vector<std::uint32_t>& offsets,
                 const std::vector<std::uint32_t>& counts, Part& part) {
        const std::size_t tokens = q.size() / (options.heads * query_size);
        std::vector<std::uint32_t> buffer_row_offsets{0};
        for (std::uint32_t count : counts) buffer_row_offsets.push_back(buffer_row_offsets.back() + count);
        part.output.resize(tokens * options.heads * value_size);
        part.lse.resize(tokens * options.heads);

        auto params = pkv::make<pkv_mla_prefill_fp8_params>();
        params.collection = latents.get();
        params.batch = &batch;
        params.rope = PKV_ROPE_INTERLEAVED;
        params.mask = PKV_MASK_CAUSAL;
        params.scale = 1 / std::sqrt(static_cast<float>(query_size));
        params.epsilon = epsilon;
        params.flags = PKV_PREFILL_FINISHED;  // write_cache has roped q and finished the rows; kv stays absent
        params.buffer_length = buffer_row_offsets.back();
        params.buffer_row_offsets = buffer_row_offsets.data();
        params.cache_offsets = offsets.data();
        params.q = pkv::tensor(q.data(), PKV_BF16, {tokens, options.heads, query_size});
        params.freqs_cis = pkv::tensor(freqs_cis, {freqs_cis.size() / rope, rope});
        params.kv_norm_gamma = pkv::tensor(gamma, {latent});
        params.kv_b_proj = pkv::tensor(up.codes.data(), PKV_F8_E4M3, {up.rows, latent});
        params.kv_b_proj_scale = pkv::tensor(up.scales, {up.rows / 128, latent / 128});
        params.output = pkv::tensor(part.output.data(), PKV_BF16, {tokens, options.heads, value_size});
        params.lse = pkv::tensor(part.lse, {tokens, options.heads});
        run("pkv_mla_prefill_fp8", pkv_mla_prefill_fp8_workspace_size, pkv_mla_prefill_fp8, params);
    }

    // Joins two parts. (The result may also take the memory of either.)
    void merge(const Part& a, const Part& b, Part& joined) {
        joined.output.resize(a.output.size());
        joined.lse.resize(a.lse.size());
        const std::size_t tokens = a.lse.size() / options.heads;
        auto output = [&](const Part& part) {
            return pkv::tensor(part.output.data(), PKV_BF16, {tokens, options.heads, value_size});
        };
        auto lse = [&](const Part& part) { return pkv::tensor(part.lse, {tokens, options.heads}); };
        auto params = pkv::make<pkv_merge_attention_params>();
        params.output_a = output(a);
        params.lse_a = lse(a);
        params.output_b = output(b);
        params.lse_b = lse(b);
        params.output = output(joined);
        params.lse = lse(joined);
        run("pkv_merge_attention", pkv_merge_attention_workspace_size, pkv_merge_attention, params);
    }

    // Every row of one collection, dequantised, sequence after sequence.
    template <class T>
    std::vector<T> read_back(const pkv::Collection& collection, const pkv_batch& batch, std::int32_t dtype,
                             std::size_t width) {
        std::vector<std::uint32_t> buffer_row_offsets{0}, cache_offsets(sequences.size(), 0);
        for (const Sequence& sequence : sequences)
            buffer_row_offsets.push_back(buffer_row_offsets.back() + sequence.length());
        std::vector<T> rows(buffer_row_offsets.back() * width);
        auto params = pkv::make<pkv_kv_gather_params>();
        params.collection = collection.get();
        params.batch = &batch;
        params.buffer_row_offsets = buffer_row_offsets.data();
        params.cache_offsets = cache_offsets.data();
        params.out = pkv::tensor(rows.data(), dtype, {buffer_row_offsets.back(), 1, width});
        run("pkv_kv_gather", pkv_kv_gather_workspace_size, pkv_kv_gather, params);
        return rows;
    }
};

pkv::Collection create_cache(const pkv::Context& context, std::uint32_t num_blocks, std::size_t width, bool fp8) {
    auto options = pkv::make<pkv_collection_options>();
    options.dtype = fp8 ? PKV_F8_E4M3 : PKV_BF16;
    options.scale_dtype = fp8 ? PKV_F32 : PKV_DTYPE_NONE;
    options.quantization_granularity = fp8 ? 128 : 0;  // 576 columns: four groups of latent, one of rope
    options.num_blocks = num_blocks;
    options.num_layers = 1;
    options.page_size = page_size;
    options.num_heads = 1;
    options.head_size = static_cast<std::uint32_t>(width);
    options.is_mla = 1;
    return pkv::create_collection(context.get(), options);
}

// Checks, in double precision and apart from the library

struct Difference {
    double squares = 0, norm = 0;
    void add(double got, double expected) {
        squares += (got - expected) * (got - expected);
        norm += expected * expected;
    }
    double relative() const { return std::sqrt(squares / (norm > 0 ? norm : 1)); }
};

// The cache rows that one sequence's new tokens should have made: normed latent part, roped tail.
Difference check_rows(const Layer& layer, const std::vector<std::uint16_t>& kv,
                      const std::vector<std::uint16_t>& cached) {
    Difference difference;
    std::size_t token = 0, first_row = 0;
    for (const Sequence& sequence : layer.sequences) {
        for (std::uint32_t i = 0; i < sequence.fresh; i++, token++) {
            std::size_t position = sequence.cached + i;
            const std::uint16_t* got = &cached[(first_row + position) * row_size];
            double x[row_size], squares = 0;
            for (std::size_t c = 0; c < row_size; c++) x[c] = from_bf16(kv[token * row_size + c]);
            for (std::size_t c = 0; c < latent; c++) squares += x[c] * x[c];
            double norm = 1 / std::sqrt(squares / latent + epsilon);
            for (std::size_t c = 0; c < latent; c++) difference.add(from_bf16(got[c]), x[c] * norm * layer.gamma[c]);
            for (std::size_t c = 0; c < rope; c += 2) {
                double cosine = layer.freqs_cis[position * rope + c], sine = layer.freqs_cis[position * rope + c + 1];
                double a = x[latent + c], b = x[latent + c + 1];
                difference.add(from_bf16(got[latent + c]), a * cosine - b * sine);
                difference.add(from_bf16(got[latent + c + 1]), a * sine + b * cosine);
            }
        }
        first_row += sequence.length();
    }
    return difference;
}

// The last new token of each sequence, a few heads, against attention computed from the cached rows and fp8 codes.
Difference check_attention(const Layer& layer, const std::vector<std::uint16_t>& q,
                           const std::vector<std::uint16_t>& cached, const Layer::Part& part) {
    Difference difference;
    const std::size_t heads = layer.options.heads;
    std::size_t token = 0, first_row = 0;
    std::vector<double> weights(latent);
    for (const Sequence& sequence : layer.sequences) {
        token += sequence.fresh;
        const std::size_t t = token - 1, keys = sequence.length();  // the last token sees every key
        // Latent rows in fp8, a scale for each 128 columns.
        std::vector<double> rows(keys * latent);
        for (std::size_t r = 0; r < keys; r++)
            for (std::size_t g = 0; g < latent; g += 128) {
                const std::uint16_t* x = &cached[(first_row + r) * row_size + g];
                float largest = 0;
                for (std::size_t c = 0; c < 128; c++) largest = std::max(largest, std::fabs(from_bf16(x[c])));
                const float scale = std::min(largest, 1200.0f) / 448;  // in f32: ties must fall the same way
                const float inverse = 1 / scale;
                for (std::size_t c = 0; c < 128; c++)
                    rows[r * latent + g + c] = scale > 0 ? from_e4m3(to_e4m3(from_bf16(x[c]) * inverse)) * scale : 0;
            }
        for (std::size_t h : std::set<std::size_t>{0, heads - 1}) {
            std::vector<double> scores(keys), projected(keys);
            // Column n of the up-projection for every key, rounded as the library rounds it.
            auto project = [&](std::size_t n) {
                for (std::size_t c = 0; c < latent; c++) weights[c] = layer.up.at(n, c);
                for (std::size_t r = 0; r < keys; r++)
                    projected[r] =
                        round_bf16(std::inner_product(weights.begin(), weights.end(), &rows[r * latent], 0.0));
            };
            const std::uint16_t* query = &q[(t * heads + h) * query_size];
            for (std::size_t d = 0; d < nope; d++) {
                project(h * (nope + value_size) + d);
                for (std::size_t r = 0; r < keys; r++) scores[r] += from_bf16(query[d]) * projected[r];
            }
            for (std::size_t r = 0; r < keys; r++)
                for (std::size_t d = 0; d < rope; d++)
                    scores[r] +=
                        double{from_bf16(query[nope + d])} * from_bf16(cached[(first_row + r) * row_size + latent + d]);
            double largest = *std::max_element(scores.begin(), scores.end()), sum = 0;
            for (double& score : scores) sum += score = std::exp((score - largest) / std::sqrt(double{query_size}));
            for (std::size_t d = 0; d < value_size; d++) {
                project(h * (nope + value_size) + nope + d);
                double expected = std::inner_product(scores.begin(), scores.end(), projected.begin(), 0.0) / sum;
                difference.add(from_bf16(part.output[(t * heads + h) * value_size + d]), expected);
            }
        }
        first_row += sequence.length();
    }
    return difference;
}

// The last new token of each sequence: the indices of the best scores, best first, and -1 where there are no more keys.
bool check_indexer(const Layer& layer, const std::vector<std::uint8_t>& q, const std::vector<float>& q_s,
                   const std::vector<float>& keys, const std::vector<std::int32_t>& indices,
                   const std::vector<float>& scores, Difference& difference) {
    std::size_t token = 0, first_row = 0;
    for (const Sequence& sequence : layer.sequences) {
        token += sequence.fresh;
        const std::size_t t = token - 1, visible = sequence.length(), kept = std::min<std::size_t>(top_k, visible);
        std::vector<double> expected(visible);
        double largest = 0;
        for (std::size_t s = 0; s < visible; s++) {
            for (std::size_t h = 0; h < index_heads; h++) {
                double product = 0;
                for (std::size_t d = 0; d < index_depth; d++)
                    product += from_e4m3(q[(t * index_heads + h) * index_depth + d]) *
                               double{keys[(first_row + s) * index_depth + d]};
                expected[s] += double{q_s[t * index_heads + h]} * std::max(product, 0.0);
            }
            largest = std::max(largest, std::fabs(expected[s]));
        }
        const std::int32_t* index = &indices[t * top_k];
        const float* score = &scores[t * top_k];
        std::vector<bool> seen(visible, false);
        for (std::size_t i = 0; i < kept; i++) {
            if (index[i] < 0 || static_cast<std::size_t>(index[i]) >= visible ||
                seen[static_cast<std::size_t>(index[i])])
                return false;
            seen[static_cast<std::size_t>(index[i])] = true;
            if (i > 0 && score[i] > score[i - 1]) return false;
            difference.add(score[i], expected[static_cast<std::size_t>(index[i])]);
        }
        for (std::size_t i = kept; i < top_k; i++)
            if (index[i] != -1 || score[i] != -std::numeric_limits<float>::infinity()) return false;
        for (std::size_t s = 0; s < visible; s++)  // nothing better was left out, up to f32 rounding
            if (!seen[s] && expected[s] > score[kept - 1] + 1e-5 * largest) return false;
        first_row += visible;
    }
    return true;
}

// The layer

int run(const Options& options) {
    // A long context that grows, a new prompt, and a decoding sequence.
    std::vector<Sequence> sequences{{2240, 64, {}}, {0, 96, {}}, {300, 1, {}}};
    std::uint32_t num_blocks = 3;  // some stay free
    for (const Sequence& sequence : sequences) num_blocks += (sequence.length() + page_size - 1) / page_size;
    std::vector<std::uint32_t> free_blocks(num_blocks);
    std::iota(free_blocks.begin(), free_blocks.end(), 0u);
    std::shuffle(free_blocks.begin(), free_blocks.end(), generator);
    for (Sequence& sequence : sequences)
        while (sequence.pages.size() * page_size < sequence.length()) {
            sequence.pages.push_back(free_blocks.back());
            free_blocks.pop_back();
        }

    pkv::Context context = pkv::create_context(options.threads);
    std::vector<float> gamma = normal(latent, 0.1);
    for (float& value : gamma) value += 1;
    Layer layer{options,
                context,
                sequences,
                create_cache(context, num_blocks, row_size, options.fp8_cache),
                create_cache(context, num_blocks, index_depth, true),
                rope_table(4096),
                gamma,
                UpProjection(options.heads),
                {}};
    std::printf("library  %s, %u threads\n", pkv_build_info(), pkv_context_num_threads(context.get()));
    std::printf(
        "layer    bf16, %zu heads of %zu + %zu / %zu, latent %zu in %s, indexer %zu heads of %zu, top %zu\n",
        options.heads, nope, rope, value_size, latent, options.fp8_cache ? "fp8" : "bf16", index_heads, index_depth,
        top_k);

    // Earlier steps: everything that is already cached. The queries of that time are gone.
    pkv::Batch history(layer.max_pages()), batch(layer.max_pages());
    std::vector<std::uint32_t> zeros, cached, fresh, lengths;
    for (const Sequence& sequence : sequences) {
        history.add(sequence.cached, 0, sequence.pages);
        batch.add(sequence.fresh, sequence.cached, sequence.pages);
        zeros.push_back(0);
        cached.push_back(sequence.cached);
        fresh.push_back(sequence.fresh);
        lengths.push_back(sequence.length());
    }
    auto random_q = [&](std::size_t tokens) { return to_bf16(normal(tokens * options.heads * query_size)); };
    {
        pkv_batch view = history.view();
        std::vector<std::uint16_t> q = random_q(history.num_tokens());
        layer.write_cache(view, q, to_bf16(normal(history.num_tokens() * row_size)));
        layer.store_index_keys(view, normal(history.num_tokens() * index_depth));
    }

    // This step: what the projections of the hidden states would give.
    pkv_batch view = batch.view();
    const std::size_t tokens = batch.num_tokens();
    std::vector<std::uint16_t> q_before = random_q(tokens), q = q_before, kv = to_bf16(normal(tokens * row_size));
    std::vector<float> keys = normal(tokens * index_depth), q_s = normal(tokens * index_heads, 0.01);
    std::vector<std::uint8_t> index_q;
    for (float value : normal(tokens * index_heads * index_depth, 100)) index_q.push_back(to_e4m3(value));
    std::size_t total_keys = 0, pairs = 0, fresh_pairs = 0;  // (query, visible key) pairs
    for (const Sequence& s : sequences) {
        total_keys += s.length();
        fresh_pairs += std::size_t{s.fresh} * (s.fresh + 1) / 2;
        pairs += std::size_t{s.fresh} * s.cached + std::size_t{s.fresh} * (s.fresh + 1) / 2;
    }
    std::printf("batch    %zu sequences, %zu new tokens, %zu keys in %u pages of %u\n\n", sequences.size(), tokens,
                total_keys, num_blocks - static_cast<std::uint32_t>(free_blocks.size()), page_size);

    int failures = 0;
    std::printf("step                      shape                            ms      rate           check\n");
    auto line = [&](const char* step, const std::string& shape, double seconds, double amount, const char* unit,
                    double error, double bound) {
        std::printf("%-25s %-28s %8.3f  %8.2f %-7s", step, shape.c_str(), seconds * 1e3, amount / seconds / 1e9, unit);
        if (bound > 0) {
            bool holds = error <= bound;  // false for NaN
            failures += !holds;
            std::printf(" error %.1e %s %.0e%s", error, holds ? "<=" : ">", bound, holds ? "" : "  FAILED");
        }
        std::printf("\n");
    };
    auto number = [](std::size_t n) { return std::to_string(n); };

    double seconds = best_seconds([&] {
        q = q_before;
        layer.write_cache(view, q, kv);
    });
    auto cached_rows = layer.read_back<std::uint16_t>(layer.latents, view, PKV_BF16, row_size);
    double moved = static_cast<double>(tokens * (row_size * (options.fp8_cache ? 3 : 4) + options.heads * rope * 4));
    line("rope, norm, quantise", number(tokens) + " rows of " + number(row_size), seconds, moved, "GB/s",
         check_rows(layer, kv, cached_rows).relative(), options.fp8_cache ? 4e-2 : 4e-3);

    seconds = best_seconds([&] { layer.store_index_keys(view, keys); });
    auto cached_keys = layer.read_back<float>(layer.index_keys, view, PKV_F32, index_depth);
    Difference stored;
    for (std::size_t b = 0, token = 0, row = 0; b < sequences.size(); row += sequences[b++].length())
        for (std::uint32_t i = 0; i < sequences[b].fresh; i++, token++)
            for (std::size_t d = 0; d < index_depth; d++)
                stored.add(cached_keys[(row + sequences[b].cached + i) * index_depth + d],
                           keys[token * index_depth + d]);
    line("store indexer keys", number(tokens) + " rows of " + number(index_depth), seconds,
         static_cast<double>(tokens * index_depth * 5), "GB/s", stored.relative(), 4e-2);

    std::vector<std::int32_t> indices(tokens * top_k);
    std::vector<float> scores(tokens * top_k);
    seconds = best_seconds([&] { layer.select_keys(view, index_q, q_s, indices, scores); });
    Difference scores_difference;
    bool order = check_indexer(layer, index_q, q_s, cached_keys, indices, scores, scores_difference);
    line("indexer", number(pairs) + " pairs, 64 heads", seconds,
         2.0 * static_cast<double>(pairs * index_heads * index_depth), "GFLOP/s",
         order ? scores_difference.relative() : std::numeric_limits<double>::infinity(), 1e-5);

    // Prefill in two chunks: first the keys that earlier steps cached (none for the new prompt), then the step's own.
    auto flops = [&](std::size_t rows, std::size_t visible) {
        return 2.0 *
               static_cast<double>(rows * layer.up.rows * latent + visible * options.heads * (query_size + value_size));
    };
    const std::size_t old_keys = total_keys - tokens;
    Layer::Part prefix, self, whole;
    seconds = best_seconds([&] { layer.prefill(view, q, zeros, cached, prefix); });
    line("prefill, cached keys", number(tokens) + " x " + number(old_keys), seconds,
         flops(old_keys, pairs - fresh_pairs), "GFLOP/s", 0, 0);
    seconds = best_seconds([&] { layer.prefill(view, q, cached, fresh, self); });
    line("prefill, new keys", number(tokens) + " x " + number(tokens), seconds, flops(tokens, fresh_pairs), "GFLOP/s",
         0, 0);
    seconds = best_seconds([&] { layer.prefill(view, q, zeros, lengths, whole); });
    line("prefill in one go", number(tokens) + " x " + number(total_keys), seconds, flops(total_keys, pairs), "GFLOP/s",
         check_attention(layer, q, cached_rows, whole).relative(), 1e-2);

    Layer::Part merged;
    seconds = best_seconds([&] { layer.merge(prefix, self, merged); });
    Difference outputs, lses;
    for (std::size_t i = 0; i < whole.output.size(); i++)
        outputs.add(from_bf16(merged.output[i]), from_bf16(whole.output[i]));
    for (std::size_t i = 0; i < whole.lse.size(); i++) lses.add(merged.lse[i], whole.lse[i]);
    line("merge, against one go", number(tokens) + " x " + number(options.heads) + " heads", seconds,
         static_cast<double>(whole.output.size() * 6 + whole.lse.size() * 12), "GB/s", outputs.relative(), 1e-2);
    const bool lse_holds = lses.relative() <= 1e-5;
    failures += !lse_holds;
    std::printf("%-80s lse   %.1e %s 1e-05%s\n", "", lses.relative(), lse_holds ? "<=" : ">",
                lse_holds ? "" : "  FAILED");

    std::printf("\n%s\n", failures ? "FAILED" : "OK: every check holds");
    return failures ? 1 : 0;
}

}  // namespace

int main(int argc, char** argv) {
    Options options;
    for (int i = 1; i < argc; i++) {
        std::string name = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
        long number = std::strtol(value.c_str(), nullptr, 10);
        if (name == "--heads" && number >= 1 && number <= 1024) options.heads = static_cast<std::size_t>(number);
        else if (name == "--threads" && number >= 0 && number <= 4096 && !value.empty())
            options.threads = static_cast<std::uint32_t>(number);
        else if (name == "--cache" && (value == "fp8" || value == "bf16")) options.fp8_cache = value == "fp8";
        else {
            std::fprintf(stderr, "usage: mla_layer [--heads 16] [--threads 0] [--cache fp8|bf16]\n");
            return 2;
        }
        i++;
    }
    try {
        return run(options);
    } catch (const pkv::Error& error) {
        std::fprintf(stderr, "mla_layer: %s\n", error.what());
        return 3;
    } catch (const std::bad_alloc&) {
        std::fprintf(stderr, "mla_layer: out of memory\n");
        return 3;
    }
}
