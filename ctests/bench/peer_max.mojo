"""MAX's own function for peer_max.cpp: the triple 4096 + 1024 + 1024 rows of 4096 columns, pages of 128, all cores. Addresses cross as integers."""
from max.gpu.host import DeviceContext
from kv_cache.types import KVCacheStaticParams, PagedKVCacheCollection
from layout import Idx, TileTensor, row_major
from nn.kv_cache_ragged import unfused_qkv_matmul_ragged_paged_gguf_quantized
from quantization.qmatmul import matmul_qint4_pack_b
from quantization.qmatmul_k import matmul_Q4_K_pack_b, matmul_Q6_K_pack_b

comptime COLS = 4096
comptime Q_ROWS = 4096
comptime KV_ROWS = 1024
comptime PAGE = 128
comptime params = KVCacheStaticParams(num_heads=8, head_size=128)


def span[T: AnyType](address: Int, length: Int) -> Span[T, MutUntrackedOrigin]:
    return Span[T, MutUntrackedOrigin](unsafe_ptr=Pointer[T, MutUntrackedOrigin](unsafe_from_address=address), length=length)


def multiply[
    encoding: StaticString, width: Int
](context: Int, m: Int, x_at: Int, q_at: Int, k_at: Int, v_at: Int, output_at: Int, blocks_at: Int, table_at: Int) raises:
    var pages = (m + PAGE - 1) // PAGE
    var offsets_list: List[UInt32] = [0, UInt32(m)]
    var lengths_list: List[UInt32] = [0]
    var x = TileTensor(span[Float32](x_at, m * COLS), row_major((Int(m), Idx[COLS])))
    var output = TileTensor(span[Float32](output_at, m * Q_ROWS), row_major((Int(m), Idx[Q_ROWS])))
    var blocks = TileTensor(
        span[Float32](blocks_at, pages * 2 * PAGE * KV_ROWS),
        row_major((Int(pages), Idx[2], Int(1), Idx[PAGE], Idx[8], Idx[128])),
    )
    var offsets = TileTensor(Span(offsets_list), row_major(Int(2)))
    var lengths = TileTensor(Span(lengths_list), row_major(Int(1)))
    var table = TileTensor(span[UInt32](table_at, pages), row_major((Int(1), Int(pages))))
    var cache = PagedKVCacheCollection[.float32, params, PAGE, scales_origin=MutUntrackedOrigin](
        blocks, lengths.as_imm(), table.as_imm(), UInt32(m), UInt32(m)
    )
    var q = TileTensor(span[UInt8](q_at, Q_ROWS * width), row_major((Idx[Q_ROWS], Int(width))))
    var k = TileTensor(span[UInt8](k_at, KV_ROWS * width), row_major((Idx[KV_ROWS], Int(width))))
    var v = TileTensor(span[UInt8](v_at, KV_ROWS * width), row_major((Idx[KV_ROWS], Int(width))))
    ref ctx = span[DeviceContext](context, 1)[0]
    unfused_qkv_matmul_ragged_paged_gguf_quantized[
        quantization_encoding_q=encoding, quantization_encoding_k=encoding, quantization_encoding_v=encoding
    ](x.as_imm(), offsets.as_imm(), q.as_imm(), k.as_imm(), v.as_imm(), cache, UInt32(0), output, ctx)


@export
def max_open() abi("C") -> Int:
    """A device context, which lives as long as the process; 0 where there is none."""
    try:
        var contexts: List[DeviceContext] = [DeviceContext(api="cpu")]
        return Int(contexts.unsafe_take_allocation().unsafe_leak())
    except:
        return 0


@export
def max_pack(type: Int, rows: Int, width: Int, source: Int, target: Int) abi("C") -> Int:
    try:
        var b = TileTensor(span[UInt8](source, rows * width), row_major((Int(rows), Int(width)))).as_imm()
        var b_packed = TileTensor(span[UInt8](target, rows * width), row_major((Int(rows), Int(width))))
        if type == 2:
            matmul_qint4_pack_b[32](b, b_packed)
        elif type == 12:
            matmul_Q4_K_pack_b(b, b_packed)
        else:
            matmul_Q6_K_pack_b(b, b_packed)
        return 0
    except:
        return 1


@export
def max_run(
    context: Int, type: Int, m: Int, x: Int, q: Int, k: Int, v: Int, output: Int, blocks: Int, table: Int
) abi("C") -> Int:
    try:
        if type == 2:
            multiply["q4_0", 2304](context, m, x, q, k, v, output, blocks, table)
        elif type == 12:
            multiply["q4_k", 2304](context, m, x, q, k, v, output, blocks, table)
        else:
            multiply["q6_k", 3360](context, m, x, q, k, v, output, blocks, table)
        return 0
    except:
        return 1
