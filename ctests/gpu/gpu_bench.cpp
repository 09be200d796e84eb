// Times every CUDA kernel on the first GPU with events: warm-up, then the median of many launches, inputs rotated past
// the L2 cache, every answer checked against the CPU (whole calls at the small size, the last tokens at the large
// ones). Beside each time what it moves and multiplies, as GB/s and TFLOP/s, and these as a part of what this card
// copies and multiplies in the same run. Where a function has kernels for this card's architecture alone, they and their
// siblings for every one are timed one after the other.
//
//   gpu_bench OUT.json [--tiny]      a table on stdout; exit status as gpu_tests. --tiny: shapes for a device that is
//   slow
#include <ctime>
#include <tuple>

#include "gpu.hpp"

using namespace gpu;

struct Figure {
    std::string name, shape;
    double microseconds = 0, bytes = 0, flops = 0, error = 0;
    size_t launches = 0, copies = 0;
    bool right = false;
    const char *kernels = "mma"; // of PAGEDKV_CUDA_KERNELS
};

static double seconds() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return double(t.tv_sec) + double(t.tv_nsec) * 1e-9;
}

// Median microseconds of launch(i), events around each.
static double median_time(const Stream &stream, double budget, size_t &launches,
                          const std::function<void(size_t)> &launch) {
    const double begin = seconds();
    size_t i = 0;
    do {
        launch(i++);
        must("cuStreamSynchronize", stream.native);
    } while (seconds() - begin < budget / 5 || i < 3);
    std::vector<double> times;
    Event from, to;
    const double start = seconds();
    while (times.size() < 5 || (times.size() < 200 && seconds() - start < budget)) {
        from.record(stream);
        launch(i++);
        to.record(stream);
        times.push_back(1000 * milliseconds(from, to));
    }
    std::sort(times.begin(), times.end());
    launches = times.size();
    return times[times.size() / 2];
}

static double copy_bandwidth(const Stream &stream, size_t bytes) {
    Memory a(bytes), b(bytes);
    size_t launches;
    const double us = median_time(stream, 0.5, launches, [&](size_t) {
        must("cuMemcpyDtoDAsync_v2", Ptr(uintptr_t(a.data())), Ptr(uintptr_t(b.data())), bytes, stream.native);
    });
    return 2 * double(bytes) / us / 1e3;
}

// TFLOP/s of mma.sync in bf16, 0 where the image beside this program does not load.
static double matrix_rate(const Stream &stream, const std::string &image_path, bool tiny) {
    std::vector<char> image;
    if (FILE *f = fopen(image_path.c_str(), "rb")) {
        char part[65536];
        for (size_t n; (n = fread(part, 1, sizeof part, f)) > 0;) image.insert(image.end(), part, part + n);
        fclose(f);
    }
    void *module = nullptr, *function = nullptr;
    if (image.empty() || call("cuModuleLoadData", &module, static_cast<const void *>(image.data())) != 0 ||
        call("cuModuleGetFunction", &function, module, "matrix_rate") != 0)
        return 0;
    struct {
        float *sink;
        uint64_t rounds;
    } params = {nullptr, tiny ? 10u : 20000u};
    const unsigned blocks = tiny ? 2 : unsigned(attribute(16)) * 2;
    void *arguments[] = {&params};
    size_t launches;
    const double us = median_time(stream, 0.5, launches, [&](size_t) {
        must("cuLaunchKernel", function, blocks, 1u, 1u, 256u, 1u, 1u, 0u, stream.native,
             static_cast<void **>(arguments), static_cast<void **>(nullptr));
    });
    return double(blocks) * 8 * double(params.rounds) * 8 * 2 * 16 * 8 * 16 / us / 1e6;
}

static double relative(const Array &a, const std::vector<unsigned char> &have, size_t first, size_t count,
                       const unsigned char *want) {
    double error = 0, norm = 0;
    for (size_t i = 0; i < count; i++) {
        const double h = decode(&have[(first + i) * size_of(a.dtype)], a.dtype),
                     w = decode(want + i * size_of(a.dtype), a.dtype);
        if (h == w || (std::isnan(h) && std::isnan(w))) {
            norm += std::isfinite(w) ? w * w : 0;
            continue;
        }
        error += (h - w) * (h - w);
        norm += w * w;
    }
    return error == 0 ? 0 : std::sqrt(error / std::max(norm, 1e-30));
}

// The last `rows` tokens of the last sequence alone on the CPU, over what the GPU left in the caches: a row does not
// depend on the batch around it.
static double check_last(Scene &c, Op op, uint32_t rows, double &bound) {
    const Array *outputs[] = {&c.values, &c.gathered, &c.q_rope_out, &c.output, &c.indices, &c.merged};
    const Array &out = *outputs[op];
    bound = op == INDEXER ? 0 : op == MERGE || op == PREFILL || op == ROPE || op == STORE ? 1e-2 : 1e-4;
    const uint32_t whole = c.tokens;
    const auto have = (op == STORE ? c.plain : out).device->download();
    if (op == STORE || op == GATHER || op == ROPE || op == MERGE) { // cheap: the whole call
        pkv_error e = {};
        e.struct_size = sizeof e;
        if (c.run(op, false, {nullptr}, {nullptr, 0}, &e) != PKV_OK) die(e.message);
        const Array &mine = op == STORE ? c.plain : out;
        return relative(mine, have, 0, mine.elements(), mine.host.data());
    }
    // Caches as the GPU finished them, the batch cut to the last rows.
    for (Array *a : {&c.mla, &c.mla_scales, &c.index}) {
        if (!a->device) continue;
        const auto now = a->device->download();
        std::copy(now.begin(), now.end(), a->host.begin());
    }
    const auto last = c.s.sequences.back();
    rows = std::min(rows, last.second);
    c.cut_host_batch({last.first + last.second - rows, rows}, rows);
    // Rows of the ragged inputs move to the front on the host.
    for (Array *a : {&c.q, &c.kv, &c.index_q, &c.index_s}) {
        const size_t row = a->host.size() / size_t(a->shape[0]);
        memmove(a->host.data(), a->host.data() + (whole - rows) * row, rows * row);
    }
    pkv_error e = {};
    e.struct_size = sizeof e;
    if (c.run(op, false, {nullptr}, {nullptr, 0}, &e) != PKV_OK) die(std::string(e.argument) + ": " + e.message);
    const size_t row = out.elements() / size_t(out.shape[0]);
    return relative(out, have, (whole - rows) * row, rows * row, out.host.data());
}

static Figure measure(const Stream &stream, Op op, const Shape &shape, bool tiny, size_t l2) {
    Figure f;
    f.name = NAMES[op];
    std::vector<std::unique_ptr<Scene>> scenes;
    scenes.push_back(std::make_unique<Scene>(shape, 1, 0, op));
    Scene &c = *scenes[0];
    const double n = c.tokens, keys = c.keys, h = shape.heads, in = double(size_of(shape.dtype)),
                 cache = double(size_of(shape.cache));
    const double row = shape.latent + shape.rope, width = shape.nope + shape.value,
                 head_row = double(shape.kv_heads) * shape.head_size;
    double pairs = 0; // of a query and a key it sees
    for (auto [cached, fresh] : shape.sequences) pairs += double(fresh) * cached + double(fresh) * (fresh + 1) / 2;
    char text[160];
    switch (op) {
    case STORE:
    case GATHER:
        f.bytes = (op == STORE ? n : keys) * head_row * (in + cache);
        snprintf(text, sizeof text, "T %u, %u x %u, bf16 to fp8", op == STORE ? c.tokens : c.keys, shape.kv_heads,
                 shape.head_size);
        break;
    case ROPE:
        f.bytes = n * (2 * h * shape.rope * in + row * (in + cache) + shape.rope * 4);
        snprintf(text, sizeof text, "T %u, H %u, %u + %u", c.tokens, shape.heads, shape.latent, shape.rope);
        break;
    case PREFILL:
        f.flops = 2 * keys * h * width * shape.latent + 2 * pairs * h * (width + shape.rope);
        f.bytes = n * h * (shape.nope + shape.rope + shape.value) * in + keys * row * cache + h * width * shape.latent;
        snprintf(text, sizeof text, "T %u, keys %u, H %u, %u + %u / %u", c.tokens, c.keys, shape.heads, shape.nope,
                 shape.rope, shape.value);
        break;
    case INDEXER:
        f.flops = 2 * pairs * shape.index_heads * shape.depth;
        f.bytes = n * shape.index_heads * (shape.depth + 4.0) + keys * (shape.depth + 4.0) + n * shape.top_k * 8;
        snprintf(text, sizeof text, "T %u, keys %u, H %u, D %u, top %u", c.tokens, c.keys, shape.index_heads,
                 shape.depth, shape.top_k);
        break;
    default:
        f.bytes = n * h * (3 * shape.value * in + 12);
        snprintf(text, sizeof text, "T %u, H %u, D %u", c.tokens, shape.heads, shape.value);
    }
    f.shape = text;
    // As many copies of everything as fill the L2 twice, up to four: a call that moves less than half the L2 is short
    // anyway.
    f.copies = std::min<size_t>(4, size_t(2 * double(l2) / f.bytes) + 2);
    if (tiny) f.copies = 2;
    while (scenes.size() < f.copies) scenes.push_back(std::make_unique<Scene>(shape, 1, 0, op));
    pkv_error e = {};
    e.struct_size = sizeof e;
    size_t workspace = 0;
    if (c.query(op, true, &workspace, &e) != PKV_OK) die(std::string(f.name) + ": " + e.message);
    Memory scratch(std::max<size_t>(workspace, 256));
    auto launch = [&](size_t i) {
        if (scenes[i % scenes.size()]->run(op, true, {stream.native}, {scratch.data(), workspace}, &e) != PKV_OK)
            die(std::string(f.name) + ": " + e.message);
    };
    c.upload();
    launch(0); // the answer to be checked: q of the prefill is roped in place, so only the first call's is right
    must("cuStreamSynchronize", stream.native);
    double bound;
    f.error = check_last(c, op, tiny ? 2 : 4, bound);
    f.right = f.error <= bound;
    f.microseconds = median_time(stream, tiny ? 0.01 : 1.0, f.launches, launch);
    return f;
}

int main(int argc, char **argv) {
    const bool tiny = argc > 2 && strcmp(argv[2], "--tiny") == 0;
    if (argc < 2) {
        printf("usage: gpu_bench OUT.json [--tiny]\n");
        return 2;
    }
    const std::string device = open_device();
    const int capability = attribute(75) * 10 + attribute(76);
    const size_t l2 = size_t(attribute(38));
    const std::string self = argv[0],
                      folder = self.find('/') == std::string::npos ? "." : self.substr(0, self.rfind('/'));
    Stream stream;
    const double bandwidth = copy_bandwidth(stream, tiny ? 1 << 20 : size_t(1) << 30),
                 rate = matrix_rate(stream, folder + "/matrix_rate.fatbin", tiny);
    printf("device: %s, sm_%d\n%s\ncopies %.0f GB/s; mma.sync bf16 %.0f TFLOP/s\n\n", device.c_str(), capability,
           pkv_build_info(), bandwidth, rate);
    printf("%-30s %-44s %-32s %10s %9s %6s %9s %6s  %s\n", "function", "shape", "kernels", "median us", "GB/s", "copy", "TFLOP/s", "mma",
           "answer");

    const std::vector<std::pair<uint32_t, uint32_t>> few = {{40, 1}, {9, 1}, {0, 30}};
    Shape v3 = {"",   PKV_BF16,        PKV_F8_E4M3,          PKV_F32, 128, 64, 128, 512, 64, 128, 128, 8, 128, 64, 128,
                2048, PKV_MASK_CAUSAL, PKV_ROPE_INTERLEAVED, {}};
    if (tiny) {
        v3.heads = 2;
        v3.index_heads = 4;
        v3.top_k = 8;
    }
    using Sequences = std::vector<std::pair<uint32_t, uint32_t>>;
    auto of = [&](Sequences s) {
        Shape shape = v3;
        shape.sequences = tiny ? few : std::move(s);
        return shape;
    };
    Sequences decode_128, decode_64;
    for (uint32_t i = 0; i < 128; i++) decode_128.push_back({511, 1});
    for (uint32_t i = 0; i < 64; i++) decode_64.push_back({8191, 1});
    const std::vector<std::pair<Op, Shape>> runs = {
        {STORE, of({{0, 4096}})},
        {STORE, of(decode_128)},
        {GATHER, of({{4096, 4096}})},
        {ROPE, of({{0, 4096}})},
        {ROPE, of(decode_128)},
        {MERGE, of({{0, 4096}})},
        {PREFILL, of({{0, 512}})},
        {PREFILL, of({{0, 4096}})},
        {PREFILL, of({{6144, 2048}})},
        {PREFILL, of({{0, 1024}, {500, 1500}, {3000, 300}, {0, 7}})},
        {INDEXER, of(decode_64)},
        {INDEXER, of({{6144, 2048}})},
        {INDEXER, of({{65536 - 2048, 2048}})},
    };
    bool all_right = true;
    std::string json;
    std::vector<std::tuple<Op, Shape, const char *>> all;
    for (const auto &[op, shape] : runs) {
        all.emplace_back(op, shape, "mma");
        if (capability == 90 && op == PREFILL) { // which has two: what each is worth
            all.emplace_back(op, shape, "mla_prefill_fp8_project_sm90.cu");
            all.emplace_back(op, shape, "mla_prefill_fp8_attention_sm90.cu");
        }
        if (capability == 90 && (op == PREFILL || op == INDEXER)) all.emplace_back(op, shape, "hopper");
    }
    for (const auto &[op, shape, kernels] : all) {
        choose_kernels(kernels);
        Figure f = measure(stream, op, shape, tiny, l2);
        f.kernels = kernels;
        all_right = all_right && f.right;
        const double gbs = f.bytes / f.microseconds / 1e3, tflops = f.flops / f.microseconds / 1e6;
        printf("%-30s %-44s %-32s %10.1f %9.0f %5.0f%% %9.1f %5.0f%%  %s\n", f.name.c_str(), f.shape.c_str(), f.kernels,
               f.microseconds, gbs, 100 * gbs / bandwidth, tflops, rate > 0 ? 100 * tflops / rate : 0, f.right ? "right" : "WRONG");
        char line[640];
        snprintf(line, sizeof line,
                 "%s\n    {\"function\": \"%s\", \"shape\": \"%s\", \"kernels\": \"%s\", \"median_us\": %.3f, \"launches\": %zu, "
                 "\"input_copies\": %zu, \"gb_per_s\": %.2f, \"tflop_per_s\": %.3f, "
                 "\"of_copy\": %.4f, \"of_mma\": %.4f, \"error\": %.3e, \"right\": %s}",
                 json.empty() ? "" : ",", f.name.c_str(), f.shape.c_str(), f.kernels, f.microseconds, f.launches, f.copies, gbs,
                 tflops, gbs / bandwidth, rate > 0 ? tflops / rate : 0, f.error, f.right ? "true" : "false");
        json += line;
    }
    FILE *out = fopen(argv[1], "w");
    if (!out) die(std::string("cannot write ") + argv[1]);
    fprintf(out,
            "{\n  \"device\": \"%s\", \"compute_capability\": %d, \"l2_bytes\": %zu, \"build\": \"%s\",\n  "
            "\"copy_gb_per_s\": %.1f, \"mma_bf16_tflop_per_s\": %.6g,\n  \"kernels\": [%s\n  ]\n}\n",
            device.c_str(), capability, l2, pkv_build_info(), bandwidth, rate, json.c_str());
    fclose(out);
    return all_right ? 0 : 1;
}
