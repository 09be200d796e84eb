// A fake NVRTC, `libnvrtc.so.13`: "compiles" to the image that fake_cuda.cpp loads. What a compiler would refuse for
// lack of files is refused here too: every #include of the program, and of what it includes, must have been handed
// over.
//
// Environment: PKV_EMU_NVRTC_FAIL=1 makes every compilation fail. pkv_emu_nvrtc_count(): compilations so far.
// It knows the architectures of NVRTC 13.0.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <set>
#include <string>

enum Result { OK = 0, INVALID_INPUT = 3, INVALID_OPTION = 5, COMPILATION = 6 };

struct Program {
    std::string name, source, image, log;
    std::map<std::string, std::string> headers;
    bool ptx = false;
};

static std::atomic<long> compilations;

// The name in an #include directive, or nothing.
static std::string included(const std::string &line) {
    const size_t hash = line.find_first_not_of(" \t");
    if (hash == std::string::npos || line.compare(hash, 8, "#include") != 0) return {};
    const size_t open = line.find_first_of("\"<", hash);
    const size_t close = open == std::string::npos ? open : line.find_first_of("\">", open + 1);
    return close == std::string::npos ? std::string() : line.substr(open + 1, close - open - 1);
}

static bool resolve(const Program &p, const std::string &text, std::set<std::string> &seen, std::string &log) {
    for (size_t begin = 0, end; begin < text.size(); begin = end + 1) {
        end = std::min(text.find('\n', begin), text.size());
        const std::string name = included(text.substr(begin, end - begin));
        if (name.empty() || name == "cuda_emu.h" || !seen.insert(name).second)
            continue; // that one: only #ifdef PKV_EMULATE
        auto header = p.headers.find(name);
        if (header == p.headers.end()) {
            log += p.name + ": error: cannot open source file \"" + name + "\"\n";
            return false;
        }
        if (!resolve(p, header->second, seen, log)) return false;
    }
    return true;
}

extern "C" {

long pkv_emu_nvrtc_count() { return compilations; }

int nvrtcVersion(int *major, int *minor) {
    *major = 13;
    *minor = 0;
    return OK;
}
const char *nvrtcGetErrorString(int code) {
    return code == OK ? "NVRTC_SUCCESS" : code == COMPILATION ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR";
}
static const int archs[] = {75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121};
int nvrtcGetNumSupportedArchs(int *count) {
    *count = int(std::size(archs));
    return OK;
}
int nvrtcGetSupportedArchs(int *out) {
    std::copy(std::begin(archs), std::end(archs), out);
    return OK;
}
int nvrtcCreateProgram(Program **out, const char *source, const char *name, int count, const char *const *headers,
                       const char *const *names) {
    if (!out || !source) return INVALID_INPUT;
    auto *p = new Program{name ? name : "default_program", source, {}, {}, {}};
    for (int i = 0; i < count; i++) p->headers[names[i]] = headers[i];
    *out = p;
    return OK;
}
int nvrtcCompileProgram(Program *p, int count, const char *const *options) {
    compilations++;
    int arch = 0;
    char kind[16] = "";
    for (int i = 0; i < count; i++) {
        if (sscanf(options[i], "--gpu-architecture=%15[a-z_]%d", kind, &arch) == 2) continue;
        if (strncmp(options[i], "--std=", 6) != 0 && strncmp(options[i], "--fmad=", 7) != 0 &&
            strncmp(options[i], "-D", 2) != 0) {
            p->log = "unknown option " + std::string(options[i]);
            return INVALID_OPTION;
        }
    }
    p->ptx = strcmp(kind, "compute_") == 0;
    if (std::find(std::begin(archs), std::end(archs), arch) == std::end(archs)) {
        p->log = "invalid value for --gpu-architecture";
        return INVALID_OPTION;
    }
    std::set<std::string> seen;
    if (!resolve(*p, p->source, seen, p->log)) return COMPILATION;
    if (const char *fail = getenv("PKV_EMU_NVRTC_FAIL"); fail && *fail == '1') {
        p->log = p->name + "(1): error: told to fail\n";
        return COMPILATION;
    }
    unsigned long long hash = 14695981039346656037ull;
    auto add = [&](const std::string &text) {
        for (unsigned char c : text) hash = (hash ^ c) * 1099511628211ull;
    };
    add(p->source);
    for (auto &[name, text] : p->headers) add(text);
    char image[256];
    snprintf(image, sizeof image, "PKVEMU1 %s %s%d %016llx\n", p->name.c_str(), kind, arch, hash);
    p->image = image;
    return OK;
}
static int image_size(Program *p, size_t *size, bool ptx) {
    if (p->ptx != ptx) return INVALID_INPUT;
    *size = p->image.size() + 1;
    return OK;
}
static int get_image(Program *p, char *image, bool ptx) {
    if (p->ptx != ptx) return INVALID_INPUT;
    memcpy(image, p->image.c_str(), p->image.size() + 1);
    return OK;
}
int nvrtcGetCUBINSize(Program *p, size_t *size) { return image_size(p, size, false); }
int nvrtcGetCUBIN(Program *p, char *image) { return get_image(p, image, false); }
int nvrtcGetPTXSize(Program *p, size_t *size) { return image_size(p, size, true); }
int nvrtcGetPTX(Program *p, char *image) { return get_image(p, image, true); }
int nvrtcGetProgramLogSize(Program *p, size_t *size) {
    *size = p->log.size() + 1;
    return OK;
}
int nvrtcGetProgramLog(Program *p, char *log) {
    memcpy(log, p->log.c_str(), p->log.size() + 1);
    return OK;
}
int nvrtcDestroyProgram(Program **p) {
    delete *p;
    *p = nullptr;
    return OK;
}

} // extern "C"
