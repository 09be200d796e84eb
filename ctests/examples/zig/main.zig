//! Stores rows of two sequences in a paged cache and gathers them back, from Zig. The header translates as it is.
//!
//!     zig build-exe main.zig -lc -I <prefix>/include -L <prefix>/lib -lpagedkv
const std = @import("std");
const c = @cImport(@cInclude("pagedkv.h"));

const tokens = 5;
const heads = 2;
const head_size = 4;
const Rows = [tokens * heads * head_size]f32;

fn zeroed(comptime T: type) T {
    var value = std.mem.zeroes(T);
    value.struct_size = @sizeOf(T);
    return value;
}

fn tensor(rows: *Rows) c.pkv_tensor {
    var t = std.mem.zeroes(c.pkv_tensor);
    t.data = rows;
    t.dtype = c.PKV_F32;
    t.ndim = 3;
    t.shape = .{ tokens, heads, head_size, 0 };
    return t;
}

fn check(what: []const u8, status: c.pkv_status, failure: *const c.pkv_error) !void {
    if (status == c.PKV_OK) return;
    std.debug.print("{s}: {s}, {s}: {s}\n", .{ what, c.pkv_status_name(status), text(&failure.argument), text(&failure.message) });
    return error.Pagedkv;
}

fn text(bytes: []const u8) []const u8 {
    return bytes[0 .. std.mem.indexOfScalar(u8, bytes, 0) orelse bytes.len];
}

pub fn main() !void {
    var failure = zeroed(c.pkv_error);

    var ctx: ?*c.pkv_context = null;
    try check("context", c.pkv_context_create(null, &ctx, &failure), &failure);
    defer c.pkv_context_destroy(ctx);

    var options = zeroed(c.pkv_collection_options);
    options.dtype = c.PKV_BF16;
    options.num_blocks = 4;
    options.num_layers = 2;
    options.page_size = 2;
    options.num_heads = heads;
    options.head_size = head_size;
    var cache: ?*c.pkv_collection = null;
    try check("collection", c.pkv_collection_create(ctx, &options, &cache, &failure), &failure);
    defer c.pkv_collection_destroy(cache);

    const row_offsets = [_]u32{ 0, 3, 5 };
    const cache_lengths = [_]u32{ 0, 0 };
    const table = [_]u32{ 2, 0, 3, 1 }; // sequence 0: blocks 2 and 0; sequence 1: block 3
    var batch = zeroed(c.pkv_batch);
    batch.input_row_offsets = &row_offsets;
    batch.cache_lengths = &cache_lengths;
    batch.lookup_table = &table;
    batch.batch_size = 2;
    batch.max_pages = 2;
    batch.max_seq_length = 3;

    var values: Rows = undefined;
    for (&values, 0..) |*value, i| value.* = @as(f32, @floatFromInt(i)) - 7; // small whole numbers are exact in bf16
    var out: Rows = undefined;

    const no_stream = std.mem.zeroes(c.pkv_stream);
    const no_workspace = std.mem.zeroes(c.pkv_buffer);
    var store = zeroed(c.pkv_kv_store_params);
    store.collection = cache;
    store.batch = &batch;
    store.layer_idx = 1;
    store.values = tensor(&values);
    try check("store", c.pkv_kv_store(ctx, no_stream, &store, no_workspace, &failure), &failure);

    var gather = zeroed(c.pkv_kv_gather_params);
    gather.collection = cache;
    gather.batch = &batch;
    gather.layer_idx = 1;
    gather.buffer_row_offsets = &row_offsets;
    gather.out = tensor(&out);
    try check("gather", c.pkv_kv_gather(ctx, no_stream, &gather, no_workspace, &failure), &failure);
    if (!std.mem.eql(f32, &values, &out)) return error.WrongRows;

    store.layer_idx = 9; // refused, with the argument's name
    if (c.pkv_kv_store(ctx, no_stream, &store, no_workspace, &failure) != c.PKV_ERR_VALUE) return error.NotRefused;
    std.debug.print("pagedkv {s} from Zig: right; {s}: {s}\n", .{ c.pkv_version(), text(&failure.argument), text(&failure.message) });
}
