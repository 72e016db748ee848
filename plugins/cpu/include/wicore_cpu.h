// C ABI of libwicore_cpu: the operators of one Gemma 3 step on a CPU.
//
// Every operator takes a pointer to a struct of plain 8-byte fields. Invariant shared by all of them: the result of
// a row (a token, a query) depends on that row's inputs alone, bit for bit - not on how many rows there are, on
// their order, on the number of threads, on how a prompt is cut into steps, or on which page slots hold its KV.
// Results of different instruction sets (wicore_cpu_set_isa) may differ in the last bits.
//
// "Operand" arrays are inputs of matrix products: bf16 bits when dtype is bfloat16; float32 values when it is
// float32; and when it is float16, float32 values with float16's precision: a row with values beyond 32768 is rounded
// after division by the power of two that brings it below, and multiplied by it again.
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define WICORE_API __attribute__((visibility("default")))
#define WICORE_CPU_ABI 6
#define WICORE_PACK_ROWS 64  // weight rows that are interleaved in one tile

enum wicore_dtype { WICORE_F32 = 0, WICORE_BF16 = 1, WICORE_F16 = 2 };

// Formats of packed weights: a dtype, or codes in groups along k with a scale each (GGUF's, by the same names).
// Q4_0 is (q - 8) * scale and Q4_1 q * scale + minimum, q 0..15, groups of 32, float16 scales and minimums. Q8_0 has
// int8 codes, groups of 32 and float16 scales; Q6_K int8 codes, groups of 16 and float32 scales.
enum wicore_format { WICORE_Q4_0 = 3, WICORE_Q4_1 = 4, WICORE_Q8_0 = 5, WICORE_Q6_K = 6 };

enum wicore_op {
  WICORE_OP_EMBED = 0,
  WICORE_OP_NORM = 1,
  WICORE_OP_ADD_NORM = 2,
  WICORE_OP_GEGLU = 3,
  WICORE_OP_LINEAR = 4,
  WICORE_OP_QK_NORM_ROPE_WRITE = 5,
  WICORE_OP_ATTENTION = 6,
  WICORE_OP_GATHER_ROWS = 7,
};

// out[i, :] = weight[ids[i], :] * scale. weight is packed (see wicore_cpu_pack) in `format`, a dtype, Q8_0 or Q6_K;
// out float32 [rows, k].
struct wicore_embed {
  int64_t rows, k, format;
  double scale;
  const int64_t* ids;
  const void* weight;
  float* out;
};

// out[i, :] = x[i, :] / sqrt(mean(x[i, :]^2) + eps) * weight, rounded. x float32 [rows, k], out operand [rows, k].
struct wicore_norm {
  int64_t rows, k, dtype;
  double eps;
  const float* x;
  const float* weight;
  void* out;
};

// residual[i, :] += rmsnorm(x[i, :]) * post; out[i, :] = rmsnorm(residual[i, :]) * next, rounded.
struct wicore_add_norm {
  int64_t rows, k, dtype;
  double eps;
  float* residual;
  const float* x;
  const float* post;
  const float* next;
  void* out;
};

// out[i, j] = gelu_tanh(x[i, j]) * x[i, k + j], rounded. x float32 [rows, 2k], out operand [rows, k].
struct wicore_geglu {
  int64_t rows, k, dtype;
  const float* x;
  void* out;
};

// out[i, j] = dot(x[i, :], weight[j, :]), float32 accumulation in ascending k. x operand [rows, k] of `dtype`,
// weight packed [n, k] in `format`: the dtype, float16, or groups, out float32 [rows, n]. With row_scale (float32 [n], bfloat16 only) x is first quantized to
// E4M3 per row with scale a = amax / 448 (1 if amax is 0), and out = dot * (a * row_scale[j]); `quantized`
// (uint16 [rows, k]) and `quantized_scale` (float32 [rows]) are its scratch.
struct wicore_linear {
  int64_t rows, n, k, dtype, format;
  const void* x;
  const void* weight;
  const float* row_scale;
  void* quantized;
  float* quantized_scale;
  float* out;
};

// Geometry of a step for one layer group. Tokens are ragged: sequence s owns tokens cu_seqlens[s] .. cu_seqlens[s + 1]
// at consecutive positions. page_table is int32 [num_seqs, table_width]: the pool slot of each page of positions; -1
// marks a page that no query of the step sees. A query sees keys before its key end, which ascends within a sequence:
// its position + 1 where key_ends is null.
struct wicore_step {
  int64_t num_seqs, table_width;
  const int32_t* cu_seqlens;
  const int32_t* positions;
  const int32_t* page_table;
  const int32_t* key_ends;
};

// One layer's KV in its group's pool [num_pages, layers, 2, page_tokens, kv_heads, head_dim]; the offset of the layer
// and the stride of a page are in elements.
struct wicore_kv {
  int64_t heads, kv_heads, head_dim, page_tokens;
  int64_t page_stride, layer_offset, kv_dtype;
  void* pool;
  const struct wicore_step* step;
};

// qkv float32 [rows, (heads + 2 kv_heads) head_dim]; q and k get RMSNorm per head and the half-split rotation by
// position (cos, sin float32 [positions, head_dim / 2]); q operand [rows, heads, head_dim]; k, v go to the pool.
struct wicore_qk_norm_rope_write {
  int64_t rows, dtype;
  double eps;
  const float* qkv;
  const float* q_weight;
  const float* k_weight;
  const float* cos;
  const float* sin;
  void* q;
  const struct wicore_kv* kv;
};

// out operand [rows, heads * head_dim] = softmax(scale * q k^T) v over the last `window` keys with the query's own
// (0: all keys), and those between it and its key end. head_dim is a multiple of 16, at most 256.
struct wicore_attention {
  int64_t rows, dtype, window;
  double scale;
  const void* q;
  void* out;
  const struct wicore_kv* kv;
};

// out[i, :] = x[index[i], :], rows of `row_bytes` bytes.
struct wicore_gather_rows {
  int64_t rows, row_bytes;
  const int64_t* index;
  const void* x;
  void* out;
};

// out[0], out[1] = the digest of a page whose bytes lie in `parts` pieces; all but the last are multiples of 4096 long.
// key: uint32 [2, 513], then [2, second_pairs] with second_pairs >= 2 * chunks + 1, chunks of 4096 bytes.
struct wicore_page_digest {
  int64_t parts, second_pairs;
  const void* const* starts;
  const int64_t* lengths;
  const uint32_t* key;
  uint64_t* out;
};

// A slot of a page on disk: its header block at `offset` of file `fd`, the payload behind it.
struct wicore_disk_part {
  int64_t fd, offset, slot;
  uint8_t* payload;
};

#define WICORE_DISK_IDENTITY 216  // bytes of a header before its seals

// bytes moved, 0 at a file's end, or the negative errno
struct iovec;
typedef int64_t (*wicore_disk_call)(int64_t fd, const struct iovec* buffers, int64_t count, int64_t offset);

// One page to write (or read), of `slot_bytes` a part. identity: the header's first bytes, of any part. The digest of
// its first `page_bytes` is taken with `key` as in wicore_page_digest (null: none). A write whose digest is not
// `expected` (null: any) ends there; else its `records`, each `record_bytes` long, are written to the places of its slots
// in `records_fd`. All pointers stay valid until the report.
struct wicore_disk_move {
  int64_t write, parts, slot_bytes;
  const struct wicore_disk_part* places;
  const uint8_t* identity;
  const uint32_t* key;
  int64_t second_pairs, page_bytes;
  const uint64_t* expected;
  int64_t records_fd, record_bytes;
  const uint8_t* records;
};

// What a move came to; a negative status is an errno.
enum wicore_disk_status {
  WICORE_DISK_MOVED = 0,
  WICORE_DISK_HEADER = 1,   // the header's checksum is wrong
  WICORE_DISK_ANOTHER = 2,  // another page, part, slot, write, namespace or format
  WICORE_DISK_PAYLOAD = 3,  // the payload's checksum is wrong
  WICORE_DISK_DIGEST = 4,   // the buffers are not what was expected
  WICORE_DISK_END = 5,      // the file ends too early
  WICORE_DISK_DROPPED = 6,
};

struct wicore_disk_report {
  const struct wicore_disk_move* move;
  int64_t status;
  uint64_t digest[2];
};

struct wicore_command {
  int64_t op;  // enum wicore_op
  const void* args;
};

// Version of this interface; the Python binding refuses another one.
WICORE_API int64_t wicore_cpu_abi(void);

// Sets the number of threads that run operators, the calling one included. Call between runs.
WICORE_API void wicore_cpu_set_threads(int64_t threads);

// Chooses the instruction set: "avx512bf16", "avx2" or "generic"; "auto" takes the best. 0, or -1 if the machine
// lacks it.
WICORE_API int wicore_cpu_set_isa(const char* name);
WICORE_API const char* wicore_cpu_isa(void);

// Runs the commands in order. 0, or -1 for an unknown operator.
WICORE_API int wicore_cpu_run(const struct wicore_command* commands, int64_t count);

// Runs beside operators, in the calling thread.
WICORE_API void wicore_cpu_page_digest(const struct wicore_page_digest* args);

// Resize pictures as Pillow does with BILINEAR, in the calling thread: rows of `width` RGB pixels of 4 bytes to `size`,
// then rows [first, last) of a square of `size` pixels of 3 bytes, of `height` such rows.
WICORE_API void wicore_cpu_resize_rows(const uint8_t* x, int64_t width, int64_t rows, int64_t size, uint8_t* out);
WICORE_API void wicore_cpu_resize_columns(const uint8_t* x, int64_t height, int64_t size, int64_t first, int64_t last,
                                          uint8_t* square);

// Threads that move pages, in the order of the calls to `begin`. Null calls: the system's own. NULL: no threads.
WICORE_API void* wicore_disk_open(int64_t threads, wicore_disk_call read, wicore_disk_call write);
WICORE_API void wicore_disk_begin(void* mover, const struct wicore_disk_move* move);  // returns at once
// 1: the move had not begun; nobody touches its buffers, and no report follows. 0: it will be reported, and a write
// that has no record yet gets none.
WICORE_API int64_t wicore_disk_drop(void* mover, const struct wicore_disk_move* move);
// Waits for reports, and takes up to `most`; 0 when there are none and `close` was called.
WICORE_API int64_t wicore_disk_take_reports(void* mover, struct wicore_disk_report* out, int64_t most);
WICORE_API void wicore_disk_close(void* mover);  // ends the threads, after what they have to do

// cuMemcpyAsync of the CUDA driver.
typedef int (*wicore_copy_async)(uint64_t target, uint64_t source, size_t bytes, void* stream);

// Calls `copy` for each of `count` copies, in the calling thread; the driver may let it wait. The first status that is
// not 0, else 0.
WICORE_API int wicore_cpu_copy_all(wicore_copy_async copy, const uint64_t* targets, const uint64_t* sources,
                                   const uint64_t* bytes, int64_t count, void* stream);

// Bytes of a packed [n, k] weight.
WICORE_API int64_t wicore_cpu_packed_bytes(int64_t n, int64_t k, int64_t format);

// Packs a weight [n, k] from the row-major `source`. Layout: tiles of 64 rows; within one, k ascending, then the 64
// rows; bfloat16 keeps pairs of k together ([n / 64][k / 2][64][2]). Codes of groups ([n, k] int8; of 4 bits
// [n, k / 2], GGUF's bytes) come with `scales` [n, groups], and for Q4_1 `minimums`: each group of a tile holds codes
// [k][64] (of 4 bits [k / 8][64] of 32 bits), then scales [64] and minimums [64]. k is a multiple of the group. The
// caller zeroes `packed` first when n % 64 or k % 2 is not 0.
WICORE_API void wicore_cpu_pack(void* packed, const void* source, const void* scales, const void* minimums, int64_t n,
                     int64_t k, int64_t format);

#ifdef __cplusplus
}
#endif
