// The kernels of MLA prefill and of the indexer, launched directly, against plain loops in double. No driver, no Rust:
// this is where a kernel is taken apart when something is wrong with it.
//
//   mla_kernels_test [prefill|indexer] [case number]
#include "emu.h"
#include "mla_indexer_fp8.cuh"
#include "mla_prefill_fp8.cuh"
#include "params.cuh"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

static int failures = 0;
#define CHECK(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition) && ++failures < 30) {                                                                         \
            printf("%s:%d: %s: ", __FILE__, __LINE__, #condition);                                                     \
            printf(__VA_ARGS__);                                                                                       \
            puts("");                                                                                                  \
        }                                                                                                              \
    } while (0)

// ---- memory of a device: 256-byte aligned, exactly as large as asked, so that a sanitizer sees one byte too far ----

template <class T> struct Buffer {
    T *data;
    size_t size;
    explicit Buffer(size_t n) : size(n) {
        const size_t bytes = std::max<size_t>(n * sizeof(T), 1);
        // The end is exact, the start is aligned by leaving bytes unused before it.
        raw = static_cast<u8 *>(malloc(bytes + 256));
        data = reinterpret_cast<T *>((reinterpret_cast<u64>(raw) + 255) & ~u64(255));
        memset(static_cast<void *>(data), 0xff, n * sizeof(T)); // NaN in every format
    }
    Buffer(const Buffer &) = delete;
    ~Buffer() { free(raw); }
    T &operator[](size_t i) { return data[i]; }
    const T &operator[](size_t i) const { return data[i]; }

private:
    u8 *raw;
};

static float decode(i32 dtype, const void *base, size_t i) { return load_as_f32(base, dtype, i64(i)); }
static void encode(i32 dtype, void *base, size_t i, float x) {
    switch (dtype) {
    case DTYPE_F32: static_cast<float *>(base)[i] = x; break;
    case DTYPE_F16: static_cast<f16 *>(base)[i] = from_f32<f16>(x); break;
    case DTYPE_BF16: static_cast<bf16 *>(base)[i] = from_f32<bf16>(x); break;
    default: static_cast<e4m3 *>(base)[i] = from_f32<e4m3>(x); break;
    }
}
static float rounded(i32 dtype, float x) {
    float out;
    alignas(8) u8 bytes[8];
    encode(dtype, bytes, 0, x);
    out = decode(dtype, bytes, 0);
    return out;
}
static size_t size_of(i32 dtype) { return dtype == DTYPE_F32 ? 4 : dtype == DTYPE_F8_E4M3 ? 1 : 2; }
static const char *suffix(i32 dtype) { return dtype == DTYPE_F32 ? "f32" : dtype == DTYPE_F16 ? "f16" : "bf16"; }

// ---- a ragged batch over pages ----

struct Sequence {
    u32 cached, fresh;         // tokens before, tokens of this call
    u32 buffer_from, buffer_n; // cached rows that prefill attends to
};
struct Pages {
    std::vector<u32> row_offsets{0}, lengths, table, buffer_offsets{0}, cache_offsets;
    u32 max_pages = 0, blocks = 0;
    u32 tokens() const { return row_offsets.back(); }
    u32 batch() const { return u32(lengths.size()); }
};
static Pages make_pages(const std::vector<Sequence> &sequences, u32 page, std::mt19937 &random) {
    Pages p;
    for (auto &s : sequences) {
        p.row_offsets.push_back(p.row_offsets.back() + s.fresh);
        p.lengths.push_back(s.cached);
        p.buffer_offsets.push_back(p.buffer_offsets.back() + s.buffer_n);
        p.cache_offsets.push_back(s.buffer_from);
        const u32 pages = (s.cached + s.fresh + page - 1) / page;
        p.max_pages = std::max(p.max_pages, pages);
        p.blocks += pages;
    }
    p.max_pages += 1;
    p.blocks += 2; // some that nobody owns
    std::vector<u32> order(p.blocks);
    std::iota(order.begin(), order.end(), 0u);
    std::shuffle(order.begin(), order.end(), random);
    p.table.assign(size_t(p.batch()) * p.max_pages, 0x7fffffffu); // never read past a sequence's pages
    u32 next = 0;
    for (u32 b = 0; b < p.batch(); b++)
        for (u32 i = 0; i < (sequences[b].cached + sequences[b].fresh + page - 1) / page; i++)
            p.table[size_t(b) * p.max_pages + i] = order[next++];
    return p;
}
static BatchParams batch_params(const Pages &p) {
    return {p.row_offsets.data(), p.lengths.data(), p.table.data(), i64(p.max_pages), p.batch(), p.max_pages};
}

// ---- prefill ----

struct PrefillCase {
    i32 dtype, cache_dtype;
    bool scaled;
    u32 page, heads, latent, nope, rope, v;
    u32 mask, mask_width;
    bool alibi;
    std::vector<Sequence> sequences;
    // 1: odd strides of q, output and kv_b_proj; 2: a NaN key; 3: K and V of key 1 overflow to infinity; 4: V alone, of
    // a key in the middle.
    int odd = 0;
    u32 group = 0; // heads a group; 0: all
};

static double relative(const std::vector<double> &got, const std::vector<double> &want) {
    double error = 0, norm = 0;
    for (size_t i = 0; i < got.size(); i++) {
        if (std::isnan(want[i]) || std::isinf(want[i])) continue;
        error += (got[i] - want[i]) * (got[i] - want[i]);
        norm += want[i] * want[i];
    }
    return norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
}

struct AttentionKernel {
    const char *name;
    u32 qk, v, warps, shared, rows;
};
static const AttentionKernel ATTENTION[] = {{"narrow", 96, 64, 4, 35840, 64},
                                            {"standard_few", 192, 128, 4, 68608, 64},
                                            {"standard", 192, 128, 8, 94208, 128},
                                            {"wide", 256, 128, 4, 84992, 64},
                                            {"sm90", 192, 128, 12, 213088, 128}};

// hopper: with the attention for sm_90a where it takes the place of a standard one, nothing elsewhere.
static void prefill(int number, const PrefillCase &c, bool hopper) {
    std::mt19937 random(u32(number) * 31 + 5);
    std::normal_distribution<float> normal;
    const Pages pages = make_pages(c.sequences, c.page, random);
    const u32 width = c.latent + c.rope, head = c.nope + c.v, features = c.heads * head, q_head = c.nope + c.rope;
    const u32 tokens = pages.tokens(), rows = pages.buffer_offsets.back(), groups = c.latent / 128;
    const u32 key_stride = round_up(c.nope, 8u), value_stride = round_up(c.v, 8u), rope_stride = round_up(c.rope, 8u);
    const AttentionKernel *kernel = nullptr;
    if (c.dtype != DTYPE_F32)
        for (auto &k : ATTENTION)
            if (!kernel && key_stride + rope_stride <= k.qk && (c.v <= k.v || k.qk >= 192) &&
                (k.warps == 4 && k.qk == 192 ? tokens <= 70 : true))
                kernel = &k;
    if (hopper && (!kernel || kernel->qk != 192)) return;
    if (hopper) kernel = &ATTENTION[4];
    const u32 granularity = c.scaled ? 64 : 0, scale_groups = c.scaled ? (width + 63) / 64 : 0;

    // The cache: NaN wherever no sequence owns a slot; two layers, this is the second.
    const size_t layer = size_t(c.page) * width, slots = size_t(pages.blocks) * 2 * c.page;
    Buffer<u8> blocks(slots * width * size_of(c.cache_dtype));
    Buffer<float> scales(slots * std::max(scale_groups, 1u));
    std::vector<float> cached(size_t(pages.batch()) * 4096 * 0);
    auto slot = [&](u32 b, u32 position) {
        return (size_t(pages.table[size_t(b) * pages.max_pages + position / c.page]) * 2 + 1) * c.page +
               position % c.page;
    };
    for (u32 b = 0; b < pages.batch(); b++)
        for (u32 s = 0; s < c.sequences[b].cached + c.sequences[b].fresh; s++)
            for (u32 i = 0; i < width; i++) {
                float x = normal(random);
                if (c.scaled) {
                    scales[slot(b, s) * scale_groups + i / 64] = 0.013f;
                    x /= 0.013f;
                }
                if (c.odd == 2 && s == c.sequences[b].cached + c.sequences[b].fresh / 2) x = NAN;
                if (c.odd == 3 && s == 1 && i < c.latent) x = 300;
                if (c.odd == 4 && s == (c.sequences[b].cached + c.sequences[b].fresh) / 2 && i < c.latent) x = 300;
                encode(c.cache_dtype, blocks.data, slot(b, s) * width + i, x);
            }
    const u32 pad = c.odd == 1 ? 3 : 0;
    Buffer<u8> q(size_t(tokens) * c.heads * (q_head + pad) * size_of(c.dtype));
    for (u32 i = 0; i < tokens * c.heads; i++)
        for (u32 j = 0; j < q_head; j++) encode(c.dtype, q.data, size_t(i) * (q_head + pad) + j, normal(random));
    const u32 weight_stride = c.latent + pad;
    Buffer<u8> weight(size_t(features) * weight_stride);
    for (u32 i = 0; i < features; i++)
        for (u32 j = 0; j < c.latent; j++)
            encode(DTYPE_F8_E4M3, weight.data, size_t(i) * weight_stride + j,
                   normal(random) * (c.odd != 4 ? 50 : i % head < c.nope ? 0.002f : 400));
    Buffer<float> weight_scales(size_t((features + 127) / 128) * groups);
    for (size_t i = 0; i < weight_scales.size; i++)
        weight_scales[i] = 0.001f * (0.5f + float(random() % 100) / 100) * (c.odd >= 3 ? 500 : 1);
    const float scale = 0.8f / std::sqrt(float(q_head));

    // Scratch and outputs.
    const u32 group = c.group ? c.group : c.heads;
    const size_t scale_stride = round_up(rows, 128u);
    Buffer<u8> codes(size_t(rows) * c.latent);
    Buffer<float> row_scales(scale_stride * groups);
    Buffer<u8> k_rope(size_t(rows) * rope_stride * size_of(c.dtype));
    Buffer<u8> keys(size_t(group) * rows * key_stride * size_of(c.dtype));
    Buffer<u8> values(size_t(group) * rows * value_stride * size_of(c.dtype));
    const u32 more = 3; // rows of q and output past the batch's tokens
    Buffer<u8> output(size_t(tokens + more) * c.heads * (c.v + pad) * size_of(c.dtype));
    Buffer<float> lse(size_t(tokens + more) * c.heads);

    const CacheParams cache{blocks.data + layer * size_of(c.cache_dtype),
                            c.scaled ? scales.data + size_t(c.page) * scale_groups : nullptr,
                            i64(2 * layer),
                            i64(width),
                            i64(2 * c.page) * scale_groups,
                            i64(scale_groups),
                            pages.blocks,
                            c.page,
                            1,
                            width,
                            granularity,
                            scale_groups,
                            c.cache_dtype,
                            c.scaled ? DTYPE_F32 : DTYPE_NONE};
    const BufferParams buffer{pages.buffer_offsets.data(), pages.cache_offsets.data(), rows};
    const std::string base = "mla_prefill_fp8_", dtype = suffix(c.dtype);
    if (rows) {
        MlaPrefillLatentParams latent{batch_params(pages), cache,    buffer, codes.data,  row_scales.data, k_rope.data,
                                      i64(scale_stride),   c.latent, c.rope, rope_stride, width % 4 == 0};
        pkv_emu::launch((base + "latent_" + dtype).c_str(), {(rows + 3) / 4, 1, 1}, 128, 0, latent);
    }
    for (u32 first = 0; first < c.heads; first += group) {
        const u32 n = std::min(group, c.heads - first);
        if (rows) {
            MlaPrefillProjectParams project{codes.data,
                                            row_scales.data,
                                            weight.data,
                                            weight_scales.data,
                                            &pages.buffer_offsets.back(),
                                            keys.data,
                                            values.data,
                                            i64(scale_stride),
                                            i64(weight_stride),
                                            i64(groups),
                                            rows,
                                            c.latent,
                                            features,
                                            first,
                                            n,
                                            c.nope,
                                            c.v,
                                            key_stride,
                                            value_stride,
                                            pad == 0,
                                            0};
            const u32 tiles = (first + n) * head / 128 + ((first + n) * head % 128 != 0) - first * head / 128;
            pkv_emu::launch((base + "project_" + dtype).c_str(), {(rows + 127) / 128 * tiles, 1, 1}, 256, 99840,
                            project);
        }
        const u32 tile_rows = kernel ? kernel->rows : 16, columns = kernel ? kernel->v : 128;
        MlaPrefillAttentionParams attention{batch_params(pages),
                                            buffer,
                                            q.data,
                                            keys.data,
                                            values.data,
                                            k_rope.data,
                                            output.data,
                                            lse.data,
                                            i64(c.heads) * (q_head + pad),
                                            i64(q_head + pad),
                                            i64(c.heads) * (c.v + pad),
                                            i64(c.v + pad),
                                            i64(c.heads),
                                            tokens + more,
                                            c.heads,
                                            first,
                                            n,
                                            c.nope,
                                            c.rope,
                                            c.v,
                                            key_stride,
                                            value_stride,
                                            rope_stride,
                                            c.mask,
                                            c.mask_width,
                                            c.alibi,
                                            scale,
                                            pad == 0 && c.nope % 8 == 0 && c.rope % 8 == 0,
                                            pad == 0 && c.v % 2 == 0,
                                            0};
        const u32 grid = ((tokens + more) / tile_rows + pages.batch()) * n * ((c.v + columns - 1) / columns);
        const std::string name = base + "attention_" + (kernel ? kernel->name : "plain") + "_" + dtype;
        pkv_emu::launch(name.c_str(), {grid, 1, 1}, kernel ? 32 * kernel->warps : 128, kernel ? kernel->shared : 6272,
                        attention);
    }

    // The same in double.
    std::vector<double> kv(size_t(rows) * features), ropes(size_t(rows) * c.rope);
    for (u32 b = 0; b < pages.batch(); b++)
        for (u32 i = 0; i < c.sequences[b].buffer_n; i++) {
            const size_t r = pages.buffer_offsets[b] + i, at = slot(b, c.sequences[b].buffer_from + i);
            std::vector<float> x(width);
            for (u32 j = 0; j < width; j++) {
                x[j] = decode(c.cache_dtype, blocks.data, at * width + j);
                if (c.scaled) x[j] *= scales[at * scale_groups + j / 64];
                x[j] = rounded(c.dtype, x[j]);
            }
            for (u32 j = 0; j < c.rope; j++) ropes[r * c.rope + j] = x[c.latent + j];
            for (u32 g = 0; g < groups; g++) {
                float amax = 0;
                for (u32 j = 0; j < 128; j++) amax = std::fmax(amax, std::fabs(x[128 * g + j]));
                const float s = std::min(amax, 1200.0f) / 448.0f, inverse = 1.0f / s;
                for (u32 n = 0; n < features; n++) {
                    double dot = 0;
                    for (u32 j = 0; j < 128; j++)
                        dot += double(std::isfinite(inverse) ? rounded(DTYPE_F8_E4M3, x[128 * g + j] * inverse) : 0) *
                               decode(DTYPE_F8_E4M3, weight.data, size_t(n) * weight_stride + 128 * g + j);
                    kv[r * features + n] += dot * s * weight_scales[size_t(n / 128) * groups + g];
                }
            }
            for (u32 n = 0; n < features; n++) kv[r * features + n] = rounded(c.dtype, float(kv[r * features + n]));
        }
    std::vector<double> got, want;
    double worst_lse = 0;
    for (u32 b = 0; b < pages.batch(); b++)
        for (u32 i = 0; i < c.sequences[b].fresh; i++)
            for (u32 h = 0; h < c.heads; h++) {
                const u32 t = pages.row_offsets[b] + i;
                const i64 p = i64(c.sequences[b].cached) + i;
                std::vector<std::pair<size_t, double>> seen;
                for (u32 j = 0; j < c.sequences[b].buffer_n; j++) {
                    const i64 k = i64(c.sequences[b].buffer_from) + j, w = c.mask_width;
                    const bool sees = c.mask == MASK_NULL ||
                                      (k <= p && (c.mask == MASK_CAUSAL ||
                                                  (c.mask == MASK_SLIDING_WINDOW_CAUSAL ? k > p - w : k / w == p / w)));
                    if (!sees) continue;
                    const size_t r = pages.buffer_offsets[b] + j;
                    double dot = 0;
                    for (u32 x = 0; x < q_head; x++)
                        dot += double(decode(c.dtype, q.data, (size_t(t) * c.heads + h) * (q_head + pad) + x)) *
                               (x < c.nope ? kv[r * features + h * head + x] : ropes[r * c.rope + x - c.nope]);
                    u32 power = 1;
                    while (power * 2 <= c.heads) power *= 2;
                    const double exponent =
                        h < power ? double(h + 1) / power : double(2 * (h - power) + 1) / (2 * power);
                    seen.push_back({r, dot * scale + (c.alibi ? std::exp2(-8 * exponent) * double(k - p) : 0.0)});
                }
                double top = -INFINITY, total = 0;
                for (auto &s : seen) top = std::max(top, s.second);
                for (auto &s : seen) total += std::exp(s.second - top);
                const double want_lse = seen.empty() ? -INFINITY : top + std::log(total),
                             got_lse = lse[size_t(t) * c.heads + h];
                if (std::isfinite(want_lse)) worst_lse = std::max(worst_lse, std::fabs(got_lse - want_lse));
                else
                    CHECK(got_lse == want_lse || (std::isnan(want_lse) && std::isnan(got_lse)),
                          "prefill %d: lse[%u][%u] %g, want %g", number, t, h, got_lse, want_lse);
                for (u32 x = 0; x < c.v; x++) {
                    double sum = 0;
                    for (auto &s : seen)
                        sum += std::exp(s.second - top) / total * kv[s.first * features + h * head + c.nope + x];
                    const double mine = decode(c.dtype, output.data, (size_t(t) * c.heads + h) * (c.v + pad) + x);
                    want.push_back(sum);
                    got.push_back(mine);
                    if (seen.empty())
                        CHECK(mine == 0, "prefill %d: output[%u][%u][%u] %g without keys", number, t, h, x, mine);
                    CHECK(std::isfinite(mine) == std::isfinite(sum) && std::isnan(mine) == std::isnan(sum),
                          "prefill %d: output[%u][%u][%u] %g, want %g", number, t, h, x, mine, sum);
                }
            }
    const double tolerance = c.dtype == DTYPE_F32 ? 1e-4 : c.dtype == DTYPE_F16 ? 2e-3 : 1e-2;
    const double error = relative(got, want);
    CHECK(error <= tolerance, "prefill %d: error %g", number, error);
    CHECK(worst_lse <= tolerance, "prefill %d: lse off by %g", number, worst_lse);
    for (size_t i = size_t(tokens) * c.heads; i < size_t(tokens + more) * c.heads; i++)
        CHECK(__float_as_uint(lse[i]) == 0xffffffffu, "prefill %d: lse row past the batch was written", number);
    for (size_t i = size_t(tokens) * c.heads * (c.v + pad) * size_of(c.dtype); i < output.size; i++)
        CHECK(output[i] == 0xff, "prefill %d: output past the batch was written", number);
    printf("prefill %2d %-5s %-12s error %.2e lse %.2e\n", number, suffix(c.dtype), kernel ? kernel->name : "plain",
           error, worst_lse);
}

static std::vector<PrefillCase> prefill_cases() {
    const i32 F32 = DTYPE_F32, F16 = DTYPE_F16, BF16 = DTYPE_BF16, F8 = DTYPE_F8_E4M3;
    const u32 CAUSAL = MASK_CAUSAL, NONE = MASK_NULL, WINDOW = MASK_SLIDING_WINDOW_CAUSAL, CHUNK = MASK_CHUNKED_CAUSAL;
    // cached, fresh, first buffer row, buffer rows
    const std::vector<Sequence> mixed = {{0, 0, 0, 0},   {5, 3, 0, 8}, {0, 37, 0, 37}, {9, 0, 0, 9},
                                         {70, 2, 0, 72}, {0, 1, 0, 1}, {4, 4, 0, 0}};
    const std::vector<Sequence> parts = {{40, 8, 16, 20}, {3, 5, 8, 0}, {100, 3, 64, 39}, {7, 9, 10, 6}};
    const std::vector<Sequence> longer = {{30, 140, 0, 170}};
    return {
        {BF16, BF16, false, 16, 2, 128, 128, 64, 128, CAUSAL, 0, false, mixed},
        {F16, F16, false, 7, 1, 256, 128, 64, 128, CAUSAL, 0, true, longer},
        {F32, F32, false, 1, 3, 128, 32, 16, 32, CAUSAL, 0, true, mixed},
        {BF16, F8, true, 64, 3, 128, 64, 32, 64, NONE, 0, false, mixed},
        {BF16, F8, false, 2, 2, 128, 192, 64, 256, CAUSAL, 0, false, parts},
        {F16, F8, true, 16, 3, 128, 20, 6, 24, WINDOW, 5, true, mixed, 1},
        {F16, BF16, false, 2, 2, 128, 33, 10, 45, CHUNK, 8, false, parts, 1},
        {F32, F8, true, 7, 2, 256, 17, 2, 131, WINDOW, 9, false, parts, 1},
        {BF16, F16, false, 16, 1, 128, 300, 64, 40, CAUSAL, 0, false, mixed},
        {BF16, BF16, false, 16, 16, 128, 8, 8, 8, CHUNK, 3, true, mixed, 0, 5},
        {BF16, BF16, false, 16, 2, 128, 128, 64, 128, CAUSAL, 0, false, longer, 2},
        {F16, F16, false, 16, 2, 128, 64, 32, 64, WINDOW, 40, false, longer, 2},
        {F16, F16, false, 16, 1, 128, 64, 32, 64, CAUSAL, 0, false, {{0, 20, 0, 20}}, 3},
        {F32, F16, false, 16, 1, 128, 24, 8, 24, CAUSAL, 0, false, {{0, 40, 0, 40}}, 2},
        {F32, F32, false, 16, 5, 384, 48, 16, 40, NONE, 0, true, parts, 0, 2},
        {BF16, BF16, false, 16, 2, 128, 64, 32, 64, CAUSAL, 0, false, {{3, 4, 0, 0}, {0, 5, 0, 0}}},
        // more tiles of keys than a ring has stages, one warpgroup's queries and two's
        {BF16, BF16, false, 64, 1, 128, 128, 64, 128, CAUSAL, 0, true, {{520, 70, 0, 590}, {389, 3, 0, 392}}},
        {F16, F16, false, 64, 1, 128, 104, 16, 200, WINDOW, 300, false, {{400, 140, 20, 500}, {0, 5, 0, 5}}, 1},
        {BF16, F8, true, 16, 2, 128, 100, 30, 77, CHUNK, 150, true, {{250, 90, 0, 340}, {128, 64, 0, 192}}, 1},
        {F16, F16, false, 32, 1, 128, 128, 64, 128, WINDOW, 140, false, {{300, 80, 0, 380}}, 2},
        {BF16, BF16, false, 32, 1, 128, 128, 64, 128, NONE, 0, false, {{300, 9, 60, 200}, {0, 5, 0, 0}}},
        {F16, F16, false, 16, 1, 128, 128, 64, 128, CAUSAL, 0, false, {{0, 270, 0, 270}}, 3},
        {F16, F16, false, 16, 3, 128, 128, 64, 200, WINDOW, 40, false, {{0, 3, 0, 3}, {60, 240, 0, 300}}, 4, 2},
        {F16, F16, false, 16, 3, 128, 64, 32, 64, WINDOW, 40, false, {{0, 3, 0, 3}, {60, 240, 0, 300}}, 4, 2},
    };
}

// ---- indexer ----

struct IndexerCase {
    u32 page, heads, depth, top_k, causal;
    std::vector<Sequence> sequences;
    int kind = 0; // 1: small integers (many ties), 2: all scores equal, 3: NaN among keys, 4: odd strides
    u32 window = 0;
    bool plain = false;
};

static void indexer(int number, const IndexerCase &c) {
    std::mt19937 random(u32(number) * 77 + 3);
    std::normal_distribution<float> normal;
    const Pages pages = make_pages(c.sequences, c.page, random);
    const u32 tokens = pages.tokens(), pad = c.kind == 4 ? 5 : 0;
    u32 max_keys = 0;
    for (auto &s : c.sequences) max_keys = std::max(max_keys, s.cached + s.fresh);
    max_keys += 3; // the host knows bounds only
    const size_t slots = size_t(pages.blocks) * c.page;
    Buffer<u8> blocks(slots * c.depth), q(size_t(tokens) * c.heads * (c.depth + pad));
    Buffer<float> scales(slots), q_s(size_t(tokens) * c.heads);
    auto value = [&] { return c.kind == 1 ? float(int(random() % 5) - 2) : c.kind == 2 ? 1.0f : 40 * normal(random); };
    auto slot = [&](u32 b, u32 s) {
        return size_t(pages.table[size_t(b) * pages.max_pages + s / c.page]) * c.page + s % c.page;
    };
    for (u32 b = 0; b < pages.batch(); b++)
        for (u32 s = 0; s < c.sequences[b].cached + c.sequences[b].fresh; s++) {
            for (u32 i = 0; i < c.depth; i++) encode(DTYPE_F8_E4M3, blocks.data, slot(b, s) * c.depth + i, value());
            if (c.kind == 3 && s % 3 == 1) blocks[slot(b, s) * c.depth + s % c.depth] = 0xff;
            scales[slot(b, s)] = c.kind == 1 || c.kind == 2  ? 1.0f
                                 : c.kind == 3 && s % 7 == 0 ? INFINITY
                                                             : 0.5f + float(random() % 64) / 64;
        }
    for (u32 i = 0; i < tokens * c.heads; i++) {
        for (u32 j = 0; j < c.depth; j++) encode(DTYPE_F8_E4M3, q.data, size_t(i) * (c.depth + pad) + j, value());
        q_s[i] = c.kind == 1 ? float(int(random() % 5) - 2) : c.kind == 2 ? 1.0f : normal(random);
    }
    u32 sort_size = 1;
    while (sort_size < std::min(c.top_k, max_keys)) sort_size *= 2;
    const u32 window = c.window ? c.window : tokens, more = 2;
    const bool global_sort = sort_size > 4096;
    const CacheParams cache{
        blocks.data, scales.data, i64(c.page) * c.depth, i64(c.depth), i64(c.page), 1, pages.blocks, c.page, 1, c.depth,
        c.depth,     1,           DTYPE_F8_E4M3,         DTYPE_F32};
    std::vector<i32> first_indices;
    std::vector<u32> first_scores;
    for (u32 round = 0; round < 2; round++) { // the second time with a window of one tile of rows
        const u32 w = round == 0 ? window : 16, stride = max_keys + round;
        Buffer<float> scratch(size_t(w) * stride);
        Buffer<u64> sorted(global_sort ? size_t(w) * sort_size : 0);
        Buffer<i32> indices(size_t(tokens + more) * c.top_k);
        Buffer<float> scores(size_t(tokens + more) * c.top_k);
        for (u32 first = 0; first < tokens + more; first += w) {
            const u32 n = std::min(w, tokens + more - first);
            MlaIndexerScoreParams score{batch_params(pages),
                                        cache,
                                        q.data,
                                        q_s.data,
                                        scratch.data,
                                        i64(c.heads) * (c.depth + pad),
                                        i64(c.depth + pad),
                                        i64(c.heads),
                                        stride,
                                        first,
                                        n,
                                        max_keys,
                                        c.heads,
                                        c.causal,
                                        pad == 0 && c.depth % 16 == 0,
                                        c.depth % 16 == 0};
            const u32 tiles = (max_keys + 127) / 128;
            if (c.depth > 128 || c.plain)
                pkv_emu::launch("mla_indexer_fp8_score_plain", {tiles * n, 1, 1}, 128, 0, score);
            else pkv_emu::launch("mla_indexer_fp8_score", {tiles * ((n + 15) / 16), 1, 1}, 128, 71680, score);
            MlaIndexerSelectParams select{batch_params(pages),
                                          scratch.data,
                                          global_sort ? sorted.data : nullptr,
                                          indices.data,
                                          scores.data,
                                          stride,
                                          c.top_k,
                                          c.top_k,
                                          first,
                                          n,
                                          max_keys,
                                          c.top_k,
                                          sort_size,
                                          c.causal,
                                          0};
            pkv_emu::launch("mla_indexer_fp8_select", {n, 1, 1}, 512, 8192 + (global_sort ? 0 : 8 * sort_size), select);
        }
        if (round == 0) {
            first_indices.assign(indices.data, indices.data + indices.size);
            first_scores.assign(reinterpret_cast<u32 *>(scores.data),
                                reinterpret_cast<u32 *>(scores.data) + scores.size);
        } else {
            CHECK(memcmp(first_indices.data(), indices.data, indices.size * 4) == 0,
                  "indexer %d: window changes indices", number);
            CHECK(memcmp(first_scores.data(), scores.data, scores.size * 4) == 0, "indexer %d: window changes scores",
                  number);
        }
    }
    for (size_t i = size_t(tokens) * c.top_k; i < first_indices.size(); i++)
        CHECK(first_indices[i] == -1 && first_scores[i] == 0xffffffffu, "indexer %d: rows past the batch were written",
              number);

    u64 swapped = 0, all = 0;
    for (u32 b = 0; b < pages.batch(); b++)
        for (u32 i = 0; i < c.sequences[b].fresh; i++) {
            const u32 t = pages.row_offsets[b] + i, length = c.sequences[b].cached + c.sequences[b].fresh;
            const u32 seen = c.causal ? c.sequences[b].cached + i + 1 : length, k = std::min(seen, c.top_k);
            std::vector<double> score(seen);
            double largest = 0;
            for (u32 s = 0; s < seen; s++) {
                double sum = 0;
                for (u32 h = 0; h < c.heads; h++) {
                    double dot = 0;
                    for (u32 x = 0; x < c.depth; x++)
                        dot += double(decode(DTYPE_F8_E4M3, q.data, (size_t(t) * c.heads + h) * (c.depth + pad) + x)) *
                               decode(DTYPE_F8_E4M3, blocks.data, slot(b, s) * c.depth + x);
                    sum += double(q_s[size_t(t) * c.heads + h]) * (dot < 0 ? 0 : dot);
                }
                score[s] = sum * scales[slot(b, s)];
                if (std::isfinite(score[s])) largest = std::max(largest, std::fabs(score[s]));
            }
            const i32 *index = first_indices.data() + size_t(t) * c.top_k;
            const u32 *bits = first_scores.data() + size_t(t) * c.top_k;
            std::vector<u32> order(seen);
            std::iota(order.begin(), order.end(), 0u);
            std::stable_sort(order.begin(), order.end(), [&](u32 x, u32 y) {
                if (std::isnan(score[x]) || std::isnan(score[y])) return !std::isnan(score[x]) && std::isnan(score[y]);
                return score[x] > score[y];
            });
            std::vector<bool> used(seen);
            for (u32 j = 0; j < c.top_k; j++) {
                if (j >= k) {
                    CHECK(index[j] == -1 && __uint_as_float(bits[j]) == -INFINITY,
                          "indexer %d: row %u column %u past the keys: %d", number, t, j, index[j]);
                    continue;
                }
                if (index[j] < 0 || u32(index[j]) >= seen || used[u32(index[j])]) {
                    CHECK(false, "indexer %d: row %u column %u holds %d of %u", number, t, j, index[j], seen);
                    continue;
                }
                used[u32(index[j])] = true;
                all++;
                const double mine = score[u32(index[j])], best = score[order[j]];
                const double close = 1e-5 * (largest + 1e-30);
                CHECK((std::isnan(mine) && std::isnan(best)) || mine == best || std::fabs(mine - best) <= close,
                      "indexer %d: row %u column %u score %g, want %g", number, t, j, mine, best);
                if (index[j] != i32(order[j])) swapped++;
                const double told = __uint_as_float(bits[j]);
                CHECK((std::isnan(told) && std::isnan(mine)) || told == mine || std::fabs(told - mine) <= close,
                      "indexer %d: row %u column %u tells %g, is %g", number, t, j, told, mine);
                if (c.kind == 1 || c.kind == 2 || std::isnan(best))
                    CHECK(index[j] == i32(order[j]), "indexer %d: row %u column %u index %d, want %u", number, t, j,
                          index[j], order[j]);
            }
        }
    CHECK(swapped <= all / 50, "indexer %d: %llu of %llu out of order", number, swapped, all);
    printf("indexer %2d heads %2u depth %3u top_k %5u rows %3u keys %5u\n", number, c.heads, c.depth, c.top_k, tokens,
           max_keys);
}

static std::vector<IndexerCase> indexer_cases() {
    const std::vector<Sequence> mixed = {{0, 0, 0, 0},   {5, 3, 0, 0}, {0, 37, 0, 0},  {9, 0, 0, 0},
                                         {130, 2, 0, 0}, {0, 1, 0, 0}, {200, 20, 0, 0}};
    const std::vector<Sequence> longer = {{2040, 2, 0, 0}, {2046, 3, 0, 0}};
    return {
        {64, 64, 128, 32, 1, mixed},
        {7, 1, 64, 16, 1, mixed, 1},
        {1, 2, 32, 300, 0, mixed, 1},
        {2, 3, 40, 20, 1, mixed, 2},
        {16, 16, 128, 50, 1, mixed, 3},
        {64, 65, 128, 24, 0, mixed, 4},
        {64, 4, 128, 2048, 1, longer, 1},
        {64, 2, 128, 1, 1, longer, 2},
        {16, 2, 192, 40, 1, mixed},
        {16, 4, 64, 5000, 0, {{5090, 2, 0, 0}}, 1},
        {16, 3, 20, 30, 1, mixed, 0, 7, true},
        {16, 128, 64, 9, 1, {{100, 3, 0, 0}}, 3},
    };
}

int main(int argc, char **argv) {
    const std::string what = argc > 1 ? argv[1] : "";
    const int only = argc > 2 ? atoi(argv[2]) : -1;
    int n = 0;
    if (what != "indexer")
        for (auto &c : prefill_cases()) {
            if (only < 0 || only == n)
                for (const bool hopper : {false, true}) prefill(n, c, hopper);
            n++;
        }
    n = 0;
    if (what != "prefill")
        for (auto &c : indexer_cases()) {
            if (only < 0 || only == n) indexer(n, c);
            n++;
        }
    if (failures) printf("%d failures\n", failures);
    return failures != 0;
}
