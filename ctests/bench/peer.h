/* What the benchmark asks of an implementation it is compared with. Each peer is a shared library of its own (peer_ggml.cpp, built once for each ggml), so
   that two copies of ggml with the same symbols can live in one process. */
#ifndef PEER_H
#define PEER_H
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

/* One text that says what was loaded, NULL where it could not be. */
const char *peer_open(const char *library, const char *directory, unsigned threads);

/* count matrices [rows[i], cols] of raw GGUF rows, `copies` times, ready for m activations [m, cols]; NULL where the peer has no such kernel. */
void *peer_prepare(int type, unsigned count, const int64_t *rows, const void *const *data, int64_t cols, unsigned copies, int repack);
void  peer_set_rows(void *matmul, int64_t m, const float *activations);
/* Run all matrices: of copy 0, or of every copy one after the other in one graph (as a decode step would). */
int   peer_run(void *matmul, int every_copy);
/* Results [m, rows[i]] of matrix i of copy 0. */
void  peer_result(void *matmul, unsigned i, float *out);
void  peer_free(void *matmul);

#ifdef __cplusplus
}
#endif
#endif
