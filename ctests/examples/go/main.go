// Stores rows of two sequences in a paged cache and gathers them back, from Go.
//
// cgo's rule: memory that C sees may hold a Go pointer only if that memory is pinned. The params structs hold pointers, so this
// program pins every Go slice that a params struct points to (runtime.Pinner, Go 1.21) for the length of the call. Handles of the
// library and device pointers are no Go pointers and pass freely.
//
//	CGO_CFLAGS=-I<prefix>/include CGO_LDFLAGS="-L<prefix>/lib -lpagedkv" go run .
package main

/*
#include <pagedkv.h>
*/
import "C"

import (
	"fmt"
	"os"
	"runtime"
	"unsafe"
)

const (
	tokens   = 5
	heads    = 2
	headSize = 4
)

// check turns a status into a Go error. The error text is the caller's memory, so it does not matter which thread a goroutine runs on.
func check(what string, status C.pkv_status, failure *C.pkv_error) {
	if status == C.PKV_OK {
		return
	}
	fmt.Fprintf(os.Stderr, "%s: %s, %s: %s\n", what, C.GoString(C.pkv_status_name(status)), C.GoString(&failure.argument[0]), C.GoString(&failure.message[0]))
	os.Exit(1)
}

func tensor(data []float32) C.pkv_tensor {
	t := C.pkv_tensor{data: unsafe.Pointer(&data[0]), dtype: C.PKV_F32, ndim: 3}
	t.shape = [4]C.int64_t{tokens, heads, headSize, 0}
	return t
}

func main() {
	failure := C.pkv_error{}
	failure.struct_size = C.size_t(unsafe.Sizeof(failure))

	var ctx *C.pkv_context
	check("context", C.pkv_context_create(nil, &ctx, &failure), &failure)
	defer C.pkv_context_destroy(ctx)

	options := C.pkv_collection_options{dtype: C.PKV_BF16, num_blocks: 4, num_layers: 2, page_size: 2, num_heads: heads, head_size: headSize}
	options.struct_size = C.size_t(unsafe.Sizeof(options))
	var cache *C.pkv_collection
	check("collection", C.pkv_collection_create(ctx, &options, &cache, &failure), &failure)
	defer C.pkv_collection_destroy(cache)

	rowOffsets := []uint32{0, 3, 5}
	cacheLengths := []uint32{0, 0}
	table := []uint32{2, 0, 3, 1} // sequence 0: blocks 2 and 0; sequence 1: block 3
	values := make([]float32, tokens*heads*headSize)
	for i := range values {
		values[i] = float32(i) - 7 // small whole numbers are exact in bf16
	}
	out := make([]float32, len(values))

	var pinner runtime.Pinner
	defer pinner.Unpin()
	pinner.Pin(&rowOffsets[0])
	pinner.Pin(&cacheLengths[0])
	pinner.Pin(&table[0])
	pinner.Pin(&values[0])
	pinner.Pin(&out[0])

	batch := new(C.pkv_batch)
	pinner.Pin(batch)
	batch.struct_size = C.size_t(unsafe.Sizeof(*batch))
	batch.input_row_offsets = (*C.uint32_t)(&rowOffsets[0])
	batch.cache_lengths = (*C.uint32_t)(&cacheLengths[0])
	batch.lookup_table = (*C.uint32_t)(&table[0])
	batch.batch_size = 2
	batch.max_pages = 2
	batch.max_seq_length = 3

	store := C.pkv_kv_store_params{collection: cache, batch: batch, layer_idx: 1, values: tensor(values)}
	store.struct_size = C.size_t(unsafe.Sizeof(store))
	check("store", C.pkv_kv_store(ctx, C.pkv_stream{}, &store, C.pkv_buffer{}, &failure), &failure)

	gather := C.pkv_kv_gather_params{collection: cache, batch: batch, layer_idx: 1, out: tensor(out)}
	gather.struct_size = C.size_t(unsafe.Sizeof(gather))
	gather.buffer_row_offsets = (*C.uint32_t)(&rowOffsets[0])
	check("gather", C.pkv_kv_gather(ctx, C.pkv_stream{}, &gather, C.pkv_buffer{}, &failure), &failure)

	for i := range values {
		if out[i] != values[i] {
			fmt.Fprintf(os.Stderr, "element %d: %v, not %v\n", i, out[i], values[i])
			os.Exit(1)
		}
	}

	store.layer_idx = 9 // refused, with the argument's name
	if status := C.pkv_kv_store(ctx, C.pkv_stream{}, &store, C.pkv_buffer{}, &failure); status != C.PKV_ERR_VALUE {
		fmt.Fprintln(os.Stderr, "layer 9 was not refused")
		os.Exit(1)
	}
	fmt.Printf("pagedkv %s from Go: right; %s: %s\n", C.GoString(C.pkv_version()), C.GoString(&failure.argument[0]), C.GoString(&failure.message[0]))
}
