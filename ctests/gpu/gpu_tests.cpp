// Every function with CUDA kernels on the first GPU, against the CPU over the same bytes: shapes that fit nothing,
// batches with empty sequences, NaN in every slot of nobody, grids past 65535, used workspaces, graphs replayed with
// other batches, damaged tables, many threads and two processes that start cold. After every call all of device memory
// is compared, so that a write where none belongs shows.
//
//   gpu_tests [--quick | --hopper | TEST...]    exit status 0 all passed, 1 not, 77 no driver or no GPU
//     --quick     two of them
//     --hopper    those that tell the kernels for sm_90a from their siblings, with PAGEDKV_CUDA_KERNELS=hopper; 77 on
//                 another card
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <thread>

#include "gpu.hpp"

using namespace gpu;
extern char **environ;

static int failures, checks;
static std::string where;

static bool check(bool ok, const std::string &what) {
    checks++;
    if (!ok && ++failures <= 40) printf("FAILED %s: %s\n", where.c_str(), what.c_str());
    return ok;
}

static pkv_error fresh_error() {
    pkv_error e = {};
    e.struct_size = sizeof e;
    return e;
}
static bool ok(pkv_status status, const pkv_error &e) {
    return check(status == PKV_OK, std::string(pkv_status_name(status)) + " about " + e.argument + ": " + e.message);
}

static std::vector<Shape> shapes() {
    const std::vector<std::pair<uint32_t, uint32_t>> mixed = {{0, 3},   {0, 0}, {5, 1}, {9, 0},
                                                              {20, 17}, {0, 1}, {31, 2}};
    return {
        {"bf16, fp8 cache with scales", PKV_BF16, PKV_F8_E4M3, PKV_F32, 128, 16, 4, 512, 64, 128, 128, 2, 128, 16, 128,
         20, PKV_MASK_CAUSAL, PKV_ROPE_INTERLEAVED, mixed},
        {"f16, page of 7, odd widths", PKV_F16, PKV_F16, 0, 0, 7, 3, 128, 10, 33, 45, 3, 20, 7, 40, 9,
         PKV_MASK_SLIDING_WINDOW_CAUSAL, PKV_ROPE_HALF_SPLIT, mixed},
        {"f32, page of 1, all keys", PKV_F32, PKV_F32, 0, 0, 1, 2, 256, 16, 24, 40, 1, 257, 3, 64, 300, PKV_MASK_NULL,
         PKV_ROPE_INTERLEAVED, mixed},
        {"bf16, fp8 cache, straddling groups", PKV_BF16, PKV_F8_E4M3, PKV_BF16, 48, 2, 5, 128, 64, 64, 64, 1, 64, 64,
         128, 64, PKV_MASK_CHUNKED_CAUSAL, PKV_ROPE_HALF_SPLIT, mixed},
        {"bf16, plain fp8 cache",
         PKV_BF16,
         PKV_F8_E4M3,
         0,
         0,
         64,
         1,
         512,
         64,
         128,
         128,
         4,
         64,
         2,
         32,
         1,
         PKV_MASK_CAUSAL,
         PKV_ROPE_INTERLEAVED,
         {{0, 70}}},
    };
}

static Shape small(std::vector<std::pair<uint32_t, uint32_t>> sequences) {
    Shape s = {};
    s.name = "";
    s.dtype = PKV_BF16;
    s.cache = PKV_F8_E4M3;
    s.scale = PKV_F32;
    s.granularity = 48;
    s.page = 16;
    s.heads = 2;
    s.latent = 128;
    s.rope = 16;
    s.nope = 32;
    s.value = 40;
    s.kv_heads = 2;
    s.head_size = 48;
    s.index_heads = 3;
    s.depth = 64;
    s.top_k = 9;
    s.mask = PKV_MASK_CAUSAL;
    s.pairs = PKV_ROPE_INTERLEAVED;
    s.sequences = std::move(sequences);
    return s;
}

// What a function writes, and how near it must come: 0 to the bit, else ‖have - want‖ / ‖want‖.
static double bound_of(const Scene &c, Op op, const Array *a) {
    const double near = c.s.dtype == PKV_F32 ? 1e-4 : c.s.dtype == PKV_F16 ? 2e-3 : 1e-2;
    if (op == PREFILL && (a == &c.output || a == &c.lse)) return near;
    if (op == MERGE && (a == &c.merged || a == &c.merged_lse || a == &c.lse_a)) return near;
    if ((op == PREFILL || op == ROPE) && (a == &c.mla || a == &c.mla_scales)) return near; // one sum in another order
    return 0;
}

// All of device memory against the CPU's.
static void compare(Scene &c, Op op) {
    for (Array *a : c.all()) {
        const std::vector<unsigned char> have = a->device->download();
        check(a->device->canaries_whole(), std::string(NAMES[op]) + " wrote outside its memory");
        if (have == a->host) continue;
        const double bound = bound_of(c, op, a);
        const size_t size = size_of(a->dtype);
        double error = 0, norm = 0;
        size_t first = ~size_t(0), count = 0;
        for (size_t i = 0; i < a->elements(); i++) {
            if (memcmp(&have[i * size], &a->host[i * size], size) == 0) {
                const double w = decode(&a->host[i * size], a->dtype);
                if (std::isfinite(w)) norm += w * w;
                continue;
            }
            const double h = decode(&have[i * size], a->dtype), w = decode(&a->host[i * size], a->dtype);
            if (std::isnan(h) && std::isnan(w)) continue;
            if (++count == 1) first = i;
            error += (h - w) * (h - w);
            norm += w * w;
        }
        const double off = count ? std::sqrt(error / std::max(norm, 1e-30)) : 0;
        if (count && !(off <= bound))
            check(false, std::string(NAMES[op]) + ": " + std::to_string(count) + " elements of " +
                             std::to_string(a->elements()) + " differ, the first is " + std::to_string(first) +
                             ", off by " + std::to_string(off));
    }
    checks++;
}

static std::vector<std::vector<unsigned char>> snapshot(Scene &c) {
    std::vector<std::vector<unsigned char>> all;
    for (Array *a : c.all()) all.push_back(a->device->download());
    return all;
}

static void run_both(Scene &c, Op op, pkv_stream stream = {nullptr}) {
    pkv_error e = fresh_error();
    ok(c.run(op, false, {nullptr}, {nullptr, 0}, &e), e);
    ok(c.run(op, true, stream, {nullptr, 0}, &e), e);
    synchronize();
}

static void every_function() {
    uint64_t seed = 0;
    for (const Shape &shape : shapes())
        for (int op = 0; op < OPS; op++) {
            where = std::string("every_function, ") + shape.name;
            Scene c(shape, ++seed, 0, op);
            run_both(c, Op(op));
            compare(c, Op(op));
        }
    Shape nothing = shapes()[0];
    for (auto sequences : {std::vector<std::pair<uint32_t, uint32_t>>{}, {{0, 0}}, {{5, 0}, {0, 0}}}) {
        where = "every_function, no new tokens";
        nothing.sequences = sequences;
        for (int op = 0; op < OPS; op++) {
            Scene c(nothing, ++seed, 1);
            if (op == MERGE) continue; // no batch
            run_both(c, Op(op));
            compare(c, Op(op));
        }
    }
}

// Every entry point that there is, on the smallest shapes that lead to it: for detectors that make everything a
// hundred times slower.
static void every_kernel() {
    struct Case {
        int32_t dtype, cache;
        uint32_t nope, value, head_size, depth, top_k;
        std::vector<std::pair<uint32_t, uint32_t>> sequences;
        std::vector<Op> ops;
        bool nan = false; // in the oldest key, which a window hides from most queries
    };
    const std::vector<std::pair<uint32_t, uint32_t>> few = {{0, 0}, {0, 3}, {0, 0}, {70, 1}, {9, 0}}, many = {{3, 66}};
    const std::vector<Op> all = {STORE, GATHER, ROPE, PREFILL, INDEXER, MERGE}, prefill = {PREFILL};
    const std::vector<Case> cases = {
        {PKV_F32, PKV_F32, 24, 40, 36, 64, 9, few, all},               // plain
        {PKV_F16, PKV_F8_E4M3, 32, 40, 48, 32, 100, few, all},         // narrow
        {PKV_BF16, PKV_F8_E4M3, 33, 45, 33, 136, 2, few, all},         // narrow, element by element
        {PKV_F16, PKV_F16, 128, 128, 0, 0, 0, few, prefill},           // standard, few queries
        {PKV_BF16, PKV_BF16, 128, 128, 0, 0, 0, few, prefill},         //
        {PKV_F16, PKV_F16, 128, 72, 0, 0, 0, many, prefill},           // standard
        {PKV_BF16, PKV_BF16, 128, 72, 0, 0, 0, many, prefill},         //
        {PKV_BF16, PKV_BF16, 128, 72, 0, 0, 0, many, prefill, true},   //
        {PKV_BF16, PKV_BF16, 128, 128, 0, 0, 0, {{400, 70}}, prefill}, // more tiles of keys than a ring has stages
        {PKV_F16, PKV_F16, 200, 136, 0, 0, 0, few, prefill},           // wide, two passes of V
        {PKV_BF16, PKV_BF16, 200, 136, 0, 0, 0, few, prefill},         //
        {PKV_F16, PKV_F16, 300, 8, 0, 0, 0, few, prefill},             // plain
        {PKV_BF16, PKV_BF16, 300, 8, 0, 0, 0, few, prefill},           //
        {PKV_F32, PKV_F32, 0, 0, 0, 16, 4100, {{4200, 1}}, {INDEXER}}, // sorted in scratch
        {PKV_F32, PKV_F32, 0, 0, 0, 16, 2048, {{3000, 2}}, {INDEXER}}, // in shared memory
    };
    uint64_t seed = 700;
    for (const Case &k : cases)
        for (const Op op : k.ops) {
            if (hopper_chosen() && op != PREFILL && op != INDEXER) continue;
            where = std::string("every_kernel, ") + NAMES[op] + " " + std::to_string(k.dtype) + " " +
                    std::to_string(k.nope);
            Shape shape = small(k.sequences);
            shape.dtype = k.dtype;
            shape.cache = k.cache;
            shape.scale = k.cache == PKV_F8_E4M3 ? PKV_F32 : 0;
            shape.nope = k.nope;
            shape.value = k.value;
            shape.head_size = k.head_size;
            shape.depth = k.depth;
            shape.top_k = k.top_k;
            if (k.ops.size() > 1) shape.latent = 896; // more groups than the projections have stages
            if (k.nan) shape.mask = PKV_MASK_SLIDING_WINDOW_CAUSAL;
            Scene c(shape, ++seed, 0, op);
            if (k.nan) {
                const size_t row = c.mla.host.size() / (size_t(c.blocks) * Scene::LAYERS * shape.page),
                             block = Scene::u32(c.table)[0] * Scene::LAYERS + Scene::LAYER;
                memset(&c.mla.host[block * shape.page * row], 0xff, 2);
            }
            if (op == MERGE) // over one of its inputs
                c.spoil = [](Op, void *p) {
                    auto &merge = *static_cast<pkv_merge_attention_params *>(p);
                    merge.lse = merge.lse_a;
                };
            c.upload();
            run_both(c, op);
            compare(c, op);
        }
    if (const auto count = reinterpret_cast<long (*)(const char *)>(dlsym(library(), "pkv_emu_count")))
        check(count("kernels not launched") == 0, "an entry point is not launched");
}

// A grid dimension of 65535 is no limit, for tokens and for sequences.
static void many_rows() {
    Shape little = small({});
    little.granularity = 0;
    little.heads = little.kv_heads = little.index_heads = 1;
    little.rope = little.nope = little.value = 8;
    little.head_size = little.depth = 16;
    little.top_k = 2;
    for (uint32_t tokens : {65535u, 65536u, 70000u}) {
        for (int op = 0; op < OPS; op++) {
            // On the emulation a block costs what a wave of them costs on a card.
            if (emulated() && (tokens != 65536 || op == PREFILL || op == INDEXER)) continue;
            where = "many_rows, " + std::to_string(tokens);
            Shape shape = little;
            if (op == PREFILL || op == INDEXER) { // many sequences: one long one would be quadratic
                for (uint32_t i = 0; i < tokens; i++) shape.sequences.push_back({i % 3, 1});
                shape.page = 4;
            } else {
                shape.sequences = {{0, 0}, {3, tokens - 1}, {0, 1}};
            }
            Scene c(shape, tokens + uint32_t(op), 0, op);
            run_both(c, Op(op));
            compare(c, Op(op));
        }
    }
}

// The queried size is enough, one byte less is refused, what lies in it does not matter, and nothing is written past
// it.
static void workspaces() {
    for (int op = 0; op < OPS; op++) {
        where = std::string("workspaces, ") + NAMES[op];
        Scene c(shapes()[0], 100 + uint64_t(op));
        size_t bytes = 0;
        pkv_error e = fresh_error();
        if (!ok(c.query(Op(op), true, &bytes, &e), e)) continue;
        std::vector<std::vector<unsigned char>> first;
        for (int dirt : {0, 0xff, 0x7e}) {
            Memory scratch(std::max<size_t>(bytes, 256));
            scratch.fill(uint8_t(dirt));
            c.upload();
            ok(c.run(Op(op), true, {nullptr}, {scratch.data(), bytes}, &e), e);
            synchronize();
            check(scratch.canaries_whole(), "the workspace is overrun");
            auto now = snapshot(c);
            if (first.empty()) first = now;
            check(now == first, "what lies in the workspace matters");
            if (bytes && dirt == 0) {
                c.upload();
                const auto before = snapshot(c);
                check(c.run(Op(op), true, {nullptr}, {scratch.data(), bytes - 1}, &e) == PKV_ERR_WORKSPACE,
                      "one byte less is taken");
                synchronize();
                check(snapshot(c) == before, "a refused call wrote");
            }
        }
    }
}

static void same_bits_every_run() {
    for (int op = 0; op < OPS; op++) {
        where = std::string("same_bits_every_run, ") + NAMES[op];
        Scene c(shapes()[3], 200 + uint64_t(op));
        std::vector<std::vector<unsigned char>> first;
        for (int i = 0; i < (emulated() ? 3 : 20); i++) {
            c.upload();
            pkv_error e = fresh_error();
            ok(c.run(Op(op), true, {nullptr}, {nullptr, 0}, &e), e);
            synchronize();
            auto now = snapshot(c);
            if (first.empty()) first = now;
            check(now == first, "other bits in another run");
        }
    }
}

// Captured once, replayed with fewer and with more rows in the same shapes, over a used workspace.
static void graphs() {
    for (int op = 0; op < OPS; op++) {
        where = std::string("graphs, ") + NAMES[op];
        Scene c(shapes()[0], 300 + uint64_t(op), 48);
        size_t bytes = 0;
        pkv_error e = fresh_error();
        ok(c.query(Op(op), true, &bytes, &e), e);
        Memory scratch(std::max<size_t>(bytes, 256));
        Stream stream;
        void *graph = nullptr, *ready = nullptr;
        must("cuStreamBeginCapture_v2", stream.native, 0);
        ok(c.run(Op(op), true, {stream.native}, {scratch.data(), bytes}, &e), e);
        must("cuStreamEndCapture", stream.native, &graph);
        must("cuGraphInstantiateWithFlags", &ready, graph, 0ull);
        std::vector<std::vector<std::pair<uint32_t, uint32_t>>> batches = {c.s.sequences};
        if (op != MERGE) {
            batches.push_back({{0, 1}, {0, 0}, {6, 0}, {2, 1}, {3, 2}, {0, 0}, {31, 0}});
            batches.push_back({{1, 2}, {0, 0}, {0, 6}, {0, 9}, {30, 7}, {0, 0}, {16, 17}});
            batches.push_back(std::vector<std::pair<uint32_t, uint32_t>>(7, {0, 0}));
            batches.push_back(c.s.sequences);
        }
        for (const auto &sequences : batches) {
            c.set_batch(sequences);
            ok(c.run(Op(op), false, {nullptr}, {nullptr, 0}, &e), e);
            must("cuGraphLaunch", ready, stream.native);
            must("cuStreamSynchronize", stream.native);
            compare(c, Op(op));
            for (Array *a : c.all()) { // the next batch starts from the same bytes on both sides
                const auto now = a->device->download();
                std::copy(now.begin(), now.end(), a->host.begin());
            }
        }
        check(scratch.canaries_whole(), "the workspace is overrun");
        must("cuGraphExecDestroy", ready);
        must("cuGraphDestroy", graph);
    }
}

// What only the device can see: nothing outside this layer's slots and the outputs is touched.
static void damaged_batches() {
    for (int op = 0; op < MERGE; op++) {
        where = std::string("damaged_batches, ") + NAMES[op];
        for (int fault = 0; fault < 6; fault++) {
            const Shape large = shapes()[0];
            Scene c(emulated() ? small(large.sequences) : large, 400 + uint64_t(op));
            auto poke = [&](Array &a, size_t i, uint32_t x) { memcpy(&a.host[4 * i], &x, 4); };
            switch (fault) {
            case 0:
                for (size_t i = 0; i < c.table.elements(); i++) poke(c.table, i, i % 2 ? 0xffffffffu : c.blocks);
                break;
            case 1:
                for (size_t i = 0; i < c.lengths.elements(); i++) poke(c.lengths, i, i % 2 ? 0xfffffff0u : 1u << 31);
                break;
            case 2: // falling
                for (size_t i = 0; i < c.row_offsets.elements(); i++) poke(c.row_offsets, i, i % 2 ? 1000000 : 3);
                break;
            case 3:
                for (size_t i = 1; i < c.row_offsets.elements(); i++) poke(c.row_offsets, i, 0xfffffff0u);
                break;
            case 4:
                for (size_t i = 1; i < c.buffer_offsets.elements(); i++)
                    poke(c.buffer_offsets, i, i % 2 ? 0xfffffff0u : 2);
                break;
            default:
                for (Array *a : {&c.row_offsets, &c.lengths, &c.table, &c.buffer_offsets})
                    for (size_t i = 0; i < a->elements(); i++) poke(*a, i, 0xffffffffu);
            }
            c.upload();
            pkv_error e = fresh_error();
            ok(c.run(Op(op), true, {nullptr}, {nullptr, 0}, &e), e);
            synchronize();
            for (Array *a : c.all()) {
                check(a->device->canaries_whole(), "fault " + std::to_string(fault) + " wrote outside its memory");
                const bool written = (op == STORE && (a == &c.plain || a == &c.plain_scales)) ||
                                     (op == GATHER && a == &c.gathered) ||
                                     ((op == ROPE || op == PREFILL) && (a == &c.mla || a == &c.mla_scales)) ||
                                     (op == ROPE && a == &c.q_rope_out) ||
                                     (op == PREFILL && (a == &c.q || a == &c.output || a == &c.lse)) ||
                                     (op == INDEXER && (a == &c.indices || a == &c.scores));
                const auto have = a->device->download();
                if (!written) {
                    check(have == a->host, "fault " + std::to_string(fault) + " changed an input");
                } else if (a == &c.plain || a == &c.mla || a == &c.plain_scales ||
                           a == &c.mla_scales) { // other layers, and keys beside values
                    const size_t outer = a == &c.plain || a == &c.plain_scales ? 4 : 2, mine = outer - 1,
                                 part = have.size() / (c.blocks * outer);
                    bool clean = true;
                    for (size_t i = 0; i < size_t(c.blocks) * outer; i++)
                        clean = clean && (i % outer == mine || memcmp(&have[i * part], &a->host[i * part], part) == 0);
                    check(clean, "fault " + std::to_string(fault) + " wrote to another layer");
                }
            }
        }
    }
}

// Queries that see no key of the buffer: zeros and a log-sum-exp of -inf, exactly; an empty buffer, and one that holds
// the last key of a sequence alone.
static void queries_without_keys() {
    for (const int which : {0, 1, 2}) // tensor cores twice, plain
        for (const uint32_t tail : {0u, 1u}) {
            where = "queries_without_keys, " + std::to_string(which);
            Shape shape = shapes()[size_t(which)];
            shape.mask = PKV_MASK_CAUSAL;
            Scene c(shape, 800 + tail, 0, PREFILL);
            std::vector<std::pair<uint32_t, uint32_t>> ranges;
            std::vector<bool> sees(c.tokens);
            for (size_t b = 0; b < shape.sequences.size(); b++) {
                const uint32_t n = std::min(tail, c.length(b));
                ranges.push_back({c.length(b) - n, n});
                if (n && shape.sequences[b].second) sees[Scene::u32(c.row_offsets)[b + 1] - 1] = true;
            }
            c.set_ranges(ranges);
            run_both(c, PREFILL);
            compare(c, PREFILL);
            const auto out = c.output.device->download(), lse = c.lse.device->download();
            bool exact = true;
            for (size_t t = 0; t < c.tokens; t++)
                for (size_t i = 0; i < shape.heads && !sees[t]; i++) {
                    const size_t row = t * shape.heads + i, bytes = shape.value * size_of(shape.dtype);
                    exact = exact && decode(&lse[4 * row], PKV_F32) == -INFINITY;
                    exact = exact && std::all_of(&out[row * bytes], &out[row * bytes] + bytes,
                                                 [](unsigned char x) { return x == 0; });
                }
            check(exact, "a query without keys has a result");
        }
}

// Prefill over the keys before a cut and over those after it, merged, is prefill over all of them; sequences that end
// before the cut have no keys after it.
static void chunks() {
    for (const int which : {0, 1, 2}) {
        const Shape shape = shapes()[size_t(which)];
        Scene c(shape, 820);
        pkv_error e = fresh_error();
        auto prefill = [&](Array &output, Array &lse, bool finished) {
            c.spoil = [&](Op, void *params) {
                auto &p = *static_cast<pkv_mla_prefill_fp8_params *>(params);
                p.output = output.tensor(true);
                p.lse = lse.tensor(true);
                if (finished) {
                    p.flags = PKV_PREFILL_FINISHED;
                    p.kv = p.freqs_cis = p.kv_norm_gamma = pkv_tensor{};
                }
            };
            ok(c.run(PREFILL, true, {nullptr}, {nullptr, 0}, &e), e);
            c.spoil = nullptr;
        };
        prefill(c.output, c.lse, false);
        synchronize();
        const auto want = c.output.device->download(), want_lse = c.lse.device->download();
        for (const uint32_t cut : {0u, 1u, shape.page - 1, shape.page, shape.page + 1, 20u}) {
            where = "chunks, " + std::string(shape.name) + " at " + std::to_string(cut);
            c.upload();
            std::vector<std::pair<uint32_t, uint32_t>> before, after;
            for (size_t b = 0; b < shape.sequences.size(); b++) {
                const uint32_t n = std::min(cut, c.length(b));
                before.push_back({0, n});
                after.push_back({n, c.length(b) - n});
            }
            c.set_ranges(before);
            prefill(c.output_a, c.lse_a, false);
            c.set_ranges(after);
            prefill(c.output_b, c.lse_b, true);
            ok(c.run(MERGE, true, {nullptr}, {nullptr, 0}, &e), e);
            synchronize();
            auto near = [&](const Array &a, const std::vector<unsigned char> &expected) {
                const auto have = a.device->download();
                double error = 0, norm = 0;
                bool same = true; // what is not finite
                for (size_t i = 0; i < a.elements(); i++) {
                    const double h = decode(&have[i * size_of(a.dtype)], a.dtype),
                                 w = decode(&expected[i * size_of(a.dtype)], a.dtype);
                    if (!std::isfinite(h) || !std::isfinite(w)) {
                        same = same && h == w;
                        continue;
                    }
                    error += (h - w) * (h - w);
                    norm += w * w;
                }
                return same && error <= norm * std::pow(bound_of(c, MERGE, &c.merged), 2);
            };
            check(near(c.merged, want) && near(c.merged_lse, want_lse), "two chunks are not the whole");
        }
    }
}

// Tables without a spare page; reads that begin where the table ends.
static void ends_of_tables() {
    for (const Op op : {GATHER, PREFILL, INDEXER}) {
        where = std::string("ends_of_tables, ") + NAMES[op];
        Scene c(small({{30, 2}, {16, 16}, {0, 32}}), 840, 0, op);
        if (op != INDEXER) c.set_ranges({{32, 0}, {31, 1}, {32, 0}});
        run_both(c, op);
        compare(c, op);
    }
}

// Scores that are NaN or infinite: every index is -1 or a key's, none comes twice, -1 only at the end.
static void scores_that_are_not_finite() {
    where = "scores_that_are_not_finite";
    for (const uint32_t top_k : {9u, 64u, 300u}) {
        Shape shape = small({{190, 5}, {0, 4}, {40, 1}});
        shape.top_k = top_k;
        Scene c(shape, 850 + top_k, 0, INDEXER);
        Random random{top_k};
        auto poke = [&](Array &a, size_t i, float x) { memcpy(&a.host[4 * i], &x, 4); };
        const float odd[] = {NAN, INFINITY, -INFINITY, -NAN, 0.0f, -0.0f};
        for (size_t i = 0; i < c.index_scales.elements(); i++)
            if (random.below(3) == 0) poke(c.index_scales, i, odd[random.below(6)]);
        for (size_t i = 0; i < c.index_s.elements(); i++)
            if (random.below(4) == 0) poke(c.index_s, i, odd[random.below(6)]);
        for (size_t i = 0; i < c.index.host.size(); i++)
            if (random.below(2000) == 0) c.index.host[i] = 0x7f;
        c.upload();
        run_both(c, INDEXER);
        compare(c, INDEXER);
        const auto bytes = c.indices.device->download();
        size_t token = 0;
        for (auto [cached, fresh] : shape.sequences)
            for (uint32_t i = 0; i < fresh; i++, token++) {
                std::vector<bool> taken(cached + i + 1);
                bool right = true;
                for (uint32_t n = 0; n < top_k; n++) {
                    int32_t index;
                    memcpy(&index, &bytes[4 * (token * top_k + n)], 4);
                    const bool is_key = index >= 0 && size_t(index) < taken.size() && !taken[size_t(index)];
                    right = right && (n < taken.size() ? is_key : index == -1);
                    if (is_key) taken[size_t(index)] = true;
                }
                check(right, "indices of token " + std::to_string(token));
            }
    }
}

// Equal scores come in the order of their positions; as many rows of top_k as keys, one more, one less.
static void ties_and_tails() {
    where = "ties_and_tails";
    for (const uint32_t top_k : {64u, 2048u, 4100u}) {
        Shape shape = small({{300, 1}, {0, 2}, {4199, 1}});
        shape.top_k = top_k;
        Scene c(shape, 870 + top_k, 0, INDEXER);
        std::fill(c.index_s.host.begin(), c.index_s.host.end(), 0);
        c.upload();
        run_both(c, INDEXER);
        compare(c, INDEXER);
        const auto bytes = c.indices.device->download();
        size_t token = 0;
        bool right = true;
        for (auto [cached, fresh] : shape.sequences)
            for (uint32_t i = 0; i < fresh; i++, token++)
                for (uint32_t n = 0; n < top_k; n++) {
                    int32_t index;
                    memcpy(&index, &bytes[4 * (token * top_k + n)], 4);
                    right = right && index == (n < cached + i + 1 ? int32_t(n) : -1);
                }
        check(right, "equal scores are not in order, top_k " + std::to_string(top_k));
    }
    Shape shape = small({{0, 1}, {1022, 1}, {1023, 1}, {1024, 1}, {2046, 1}, {2047, 1}, {2048, 1}});
    shape.top_k = 2048;
    Scene c(shape, 880, 0, INDEXER);
    run_both(c, INDEXER);
    compare(c, INDEXER);
}

// A row's bits do not depend on the rows around it.
static void alone_and_in_a_batch() {
    for (const Op op : {ROPE, PREFILL, INDEXER}) {
        where = std::string("alone_and_in_a_batch, ") + NAMES[op];
        Scene c(shapes()[0], 890, 0, op);
        pkv_error e = fresh_error();
        ok(c.run(op, true, {nullptr}, {nullptr, 0}, &e), e);
        synchronize();
        auto outputs = [&] {
            std::vector<Array *> arrays = {&c.q_rope_out};
            if (op == PREFILL) arrays = {&c.output, &c.lse};
            if (op == INDEXER) arrays = {&c.indices, &c.scores};
            return arrays;
        };
        std::vector<std::vector<unsigned char>> together;
        for (Array *a : outputs()) together.push_back(a->device->download());
        const auto all = c.s.sequences;
        size_t first = 0;
        for (size_t b = 0; b < all.size(); first += all[b++].second) {
            const size_t rows = all[b].second;
            if (rows == 0) continue;
            auto alone = all;
            for (size_t other = 0; other < all.size(); other++)
                if (other != b) alone[other].second = 0;
            c.upload();
            c.set_batch(alone);
            c.spoil = [&](Op, void *params) { // its rows of every ragged tensor
                auto cut = [&](pkv_tensor &t) {
                    size_t row = size_of(t.dtype);
                    for (int d = 1; d < t.ndim; d++) row *= size_t(t.shape[d]);
                    t.data = static_cast<unsigned char *>(t.data) + first * row;
                    t.shape[0] = int64_t(rows);
                };
                if (op == ROPE) {
                    auto &p = *static_cast<pkv_mla_rope_rmsnorm_quantize_params *>(params);
                    for (pkv_tensor *t : {&p.q_rope, &p.q_rope_output, &p.kv}) cut(*t);
                } else if (op == PREFILL) {
                    auto &p = *static_cast<pkv_mla_prefill_fp8_params *>(params);
                    for (pkv_tensor *t : {&p.q, &p.kv, &p.output, &p.lse}) cut(*t);
                } else {
                    auto &p = *static_cast<pkv_mla_indexer_fp8_params *>(params);
                    for (pkv_tensor *t : {&p.q, &p.q_s, &p.output_indices, &p.output_scores}) cut(*t);
                }
            };
            ok(c.run(op, true, {nullptr}, {nullptr, 0}, &e), e);
            c.spoil = nullptr;
            synchronize();
            for (size_t i = 0; i < outputs().size(); i++) {
                const Array &a = *outputs()[i];
                const auto have = a.device->download();
                const size_t row = have.size() / size_t(a.shape[0]);
                check(memcmp(&have[first * row], &together[i][first * row], rows * row) == 0,
                      "other bits alone, sequence " + std::to_string(b));
            }
        }
    }
}

// Scratch is bounded: what does not fit goes through it in groups of heads and windows of rows, with the same bits.
static void groups_and_windows() {
    for (const Op op : {PREFILL, INDEXER}) {
        where = std::string("groups_and_windows, ") + NAMES[op];
        Shape shape = small({{5, 30}, {2, 10}});
        shape.heads = 3;
        shape.value = 1024;
        Scene c(shape, 895, 0, op);
        run_both(c, op);
        compare(c, op);
        for (Array *a : c.all()) {
            const auto now = a->device->download();
            std::copy(now.begin(), now.end(), a->host.begin());
        }
        uint32_t rows = c.tokens;
        c.spoil = [&](Op, void *params) {
            if (op == PREFILL) { // K and V of one head then take more than half of what a group may
                auto &p = *static_cast<pkv_mla_prefill_fp8_params *>(params);
                p.buffer_length = 65536;
                p.flags = PKV_PREFILL_FINISHED;
                p.kv = p.freqs_cis = p.kv_norm_gamma = pkv_tensor{};
            } else { // the window is 16 rows then
                auto &p = *static_cast<pkv_mla_indexer_fp8_params *>(params);
                const_cast<pkv_batch *>(p.batch)->max_cache_length = 1 << 20;
                for (pkv_tensor *t : {&p.q, &p.q_s, &p.output_indices, &p.output_scores}) t->shape[0] = rows;
            }
        };
        size_t bytes = 0;
        pkv_error e = fresh_error();
        ok(c.run(op, true, {nullptr}, {nullptr, 0}, &e), e);
        synchronize();
        for (Array *a : c.all()) check(a->device->download() == a->host, "other bits in parts");
        rows = 1 << 20;
        ok(c.query(op, true, &bytes, &e), e);
        check(bytes < size_t(op == PREFILL ? 512 : 80) << 20, "scratch of " + std::to_string(bytes) + " bytes");
    }
}

static void page_sizes() {
    for (const uint32_t page : {1u, 2u, 7u, 16u, 32u, 64u, 128u, 256u})
        for (int op = 0; op < MERGE; op++) {
            where = std::string("page_sizes, ") + NAMES[op] + " " + std::to_string(page);
            Shape shape = small({{page - 1, 2}, {0, page > 64 ? 3 : page + 1}, {2 * page, 1}});
            shape.page = page;
            Scene c(shape, 900 + page, 0, op);
            run_both(c, Op(op));
            compare(c, Op(op));
        }
}

// What the host can see is refused, by name, with nothing written.
static void refusals() {
    struct Bad {
        Op op;
        pkv_status status;
        const char *argument;
        std::function<void(void *)> spoil;
    };
    auto of = [](auto member_of, auto change) {
        return [=](void *p) { change(*static_cast<decltype(member_of) *>(p)); };
    };
    const pkv_kv_store_params store = {};
    const pkv_kv_gather_params gather = {};
    const pkv_mla_rope_rmsnorm_quantize_params rope = {};
    const pkv_mla_prefill_fp8_params prefill = {};
    const pkv_mla_indexer_fp8_params indexer = {};
    const pkv_merge_attention_params merge = {};
    const std::vector<Bad> table = {
        {STORE, PKV_ERR_VALUE, "params.layer_idx", of(store, [](auto &p) { p.layer_idx = 2; })},
        {STORE, PKV_ERR_DTYPE, "params.values", of(store, [](auto &p) { p.values.dtype = PKV_I32; })},
        {STORE, PKV_ERR_SHAPE, "params.values", of(store, [](auto &p) { p.values.shape[2]++; })},
        {STORE, PKV_ERR_NULL, "params.values", of(store, [](auto &p) { p.values.data = nullptr; })},
        {GATHER, PKV_ERR_VALUE, "params.kv_idx", of(gather, [](auto &p) { p.kv_idx = 2; })},
        {GATHER, PKV_ERR_NULL, "params.buffer_row_offsets",
         of(gather, [](auto &p) { p.buffer_row_offsets = nullptr; })},
        {GATHER, PKV_ERR_SHAPE, "params.out", of(gather, [](auto &p) { p.out.shape[1]++; })},
        {ROPE, PKV_ERR_VALUE, "params.rope", of(rope, [](auto &p) { p.rope = 7; })},
        {ROPE, PKV_ERR_VALUE, "params.epsilon", of(rope, [](auto &p) { p.epsilon = -1; })},
        {ROPE, PKV_ERR_VALUE, "params.freqs_cis",
         of(rope, [](auto &p) { p.freqs_cis.shape[0] = 3; })}, // the batch may reach further
        {ROPE, PKV_ERR_SHAPE, "params.kv", of(rope, [](auto &p) { p.kv.shape[1]--; })},
        {PREFILL, PKV_ERR_VALUE, "params.mask", of(prefill, [](auto &p) { p.mask = 9; })},
        {PREFILL, PKV_ERR_VALUE, "params.scale", of(prefill, [](auto &p) { p.scale = INFINITY; })},
        {PREFILL, PKV_ERR_SHAPE, "params.kv_b_proj", of(prefill, [](auto &p) { p.kv_b_proj.shape[0]--; })},
        {PREFILL, PKV_ERR_SHAPE, "params.kv_b_proj_scale", of(prefill, [](auto &p) { p.kv_b_proj_scale.shape[1]++; })},
        {INDEXER, PKV_ERR_VALUE, "params.top_k", of(indexer, [](auto &p) { p.top_k = 0; })},
        {INDEXER, PKV_ERR_VALUE, "params.mask", of(indexer, [](auto &p) { p.mask = PKV_MASK_CHUNKED_CAUSAL; })},
        {INDEXER, PKV_ERR_DTYPE, "params.q_s", of(indexer, [](auto &p) { p.q_s.dtype = PKV_BF16; })},
        {MERGE, PKV_ERR_SHAPE, "params.lse_b", of(merge, [](auto &p) { p.lse_b.shape[1]++; })},
        {MERGE, PKV_ERR_DTYPE, "params.output_b", of(merge, [](auto &p) { p.output_b.dtype = PKV_F32; })},
    };
    Scene c(shapes()[0], 500);
    const auto before = snapshot(c);
    for (const Bad &bad : table) {
        where = std::string("refusals, ") + NAMES[bad.op] + " " + bad.argument;
        c.spoil = [&](Op, void *p) { bad.spoil(p); };
        pkv_error e = fresh_error();
        const pkv_status status = c.run(bad.op, true, {nullptr}, {nullptr, 0}, &e);
        synchronize();
        check(status == bad.status && strstr(e.argument, bad.argument),
              std::string("answers ") + pkv_status_name(status) + " about " + e.argument + ": " + e.message);
        check(snapshot(c) == before, "a refused call wrote");
    }
}

// Eight threads whose first calls meet, each with its own stream and batch.
static void threads() {
    where = "threads";
    std::vector<std::unique_ptr<Scene>> scenes;
    for (int i = 0; i < 8; i++) scenes.push_back(std::make_unique<Scene>(shapes()[0], 600 + uint64_t(i)));
    void *current = nullptr;
    must("cuCtxGetCurrent", &current);
    std::vector<std::thread> all;
    std::vector<pkv_error> errors(8, fresh_error());
    std::vector<int> faults(8);
    for (size_t i = 0; i < 8; i++)
        all.emplace_back([&, i] {
            must("cuCtxSetCurrent", current);
            Stream stream;
            for (int op = 0; op < OPS; op++)
                faults[i] +=
                    scenes[i]->run(Op((op + int(i)) % OPS), true, {stream.native}, {nullptr, 0}, &errors[i]) != PKV_OK;
            must("cuStreamSynchronize", stream.native);
        });
    for (auto &t : all) t.join();
    for (size_t i = 0; i < 8; i++) check(faults[i] == 0, errors[i].message);
    // Each did its own: the indexer's exact results say so.
    for (auto &scene : scenes) {
        pkv_error e = fresh_error();
        ok(scene->run(INDEXER, false, {nullptr}, {nullptr, 0}, &e), e);
        check(scene->indices.device->download() == scene->indices.host, "a thread's result is another's");
    }
}

// Two processes that start with the same empty cache of kernels.
static void processes(const char *self) {
    where = "processes";
    std::string cache = std::filesystem::temp_directory_path() / "pagedkv-cache-XXXXXX";
    if (!mkdtemp(&cache[0])) die("mkdtemp");
    setenv("PAGEDKV_CACHE_DIR", cache.c_str(), 1);
    pid_t children[2];
    std::string program = self;
    for (pid_t &child : children) {
        char *const arguments[] = {&program[0], const_cast<char *>("same_bits_every_run"), nullptr};
        if (posix_spawn(&child, self, nullptr, nullptr, arguments, environ) != 0) die("posix_spawn");
    }
    for (pid_t child : children) {
        int status = 0;
        waitpid(child, &status, 0);
        check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a process failed");
    }
    std::filesystem::remove_all(cache);
}

int main(int argc, char **argv) {
    std::vector<std::string> wanted;
    bool quick = false, hopper = false;
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], "--quick") == 0) quick = true;
        else if (strcmp(argv[i], "--hopper") == 0) hopper = true;
        else wanted.push_back(argv[i]);
    if (hopper) {
        setenv("PAGEDKV_CUDA_KERNELS", "hopper", 1);
        wanted = {"every_function", "every_kernel",   "graphs",     "damaged_batches",      "queries_without_keys",
                  "ends_of_tables", "ties_and_tails", "page_sizes", "alone_and_in_a_batch", "groups_and_windows",
                  "scores_that_are_not_finite"};
    }
    const std::string device = open_device();
    if (hopper && attribute(75) * 10 + attribute(76) != 90) return 77;
    setvbuf(stdout, nullptr, _IOLBF, 0);
    printf("device: %s\n%s\n", device.c_str(), pkv_build_info());
    // First what must meet cold kernels.
    const std::vector<std::pair<std::string, std::function<void()>>> tests = {
        {"threads", threads},
        {"every_function", every_function},
        {"every_kernel", every_kernel},
        {"refusals", refusals},
        {"workspaces", workspaces},
        {"graphs", graphs},
        {"damaged_batches", damaged_batches},
        {"queries_without_keys", queries_without_keys},
        {"chunks", chunks},
        {"ends_of_tables", ends_of_tables},
        {"scores_that_are_not_finite", scores_that_are_not_finite},
        {"ties_and_tails", ties_and_tails},
        {"alone_and_in_a_batch", alone_and_in_a_batch},
        {"groups_and_windows", groups_and_windows},
        {"page_sizes", page_sizes},
        {"same_bits_every_run", same_bits_every_run},
        {"many_rows", many_rows},
        {"processes", [&] { processes(argv[0]); }},
    };
    int ran = 0;
    for (const auto &[name, test] : tests) {
        const bool listed = std::find(wanted.begin(), wanted.end(), name) != wanted.end();
        if (quick ? name != "threads" && name != "refusals" : !wanted.empty() && !listed) continue;
        const int before = failures;
        test();
        synchronize();
        printf("%-6s %s\n", failures == before ? "ok" : "FAILED", name.c_str());
        ran++;
    }
    printf("%d tests, %d checks, %d failures\n", ran, checks, failures);
    return failures || !ran ? 1 : 0;
}
