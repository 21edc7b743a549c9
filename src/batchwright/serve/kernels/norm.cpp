// The root-mean-square norm of each row, or of each query and key head within it, in float32 and rounded once.

#include "simd.h"

namespace batchwright {
namespace {

template <class T, class W>
inline void norm(const T *x, const W *weight, T *y, int64_t width, float epsilon) {
  const int64_t whole = width / kLanes * kLanes;
  const int rest = int(width - whole);
  Floats squares = {};
  for (int64_t i = 0; i < whole; i += kLanes) squares = fused(read(x + i), read(x + i), squares);
  if (rest) squares = fused(read_some(x + whole, rest), read_some(x + whole, rest), squares);
  const Floats scale = splat(1 / std::sqrt(total(squares) / float(width) + epsilon));
  for (int64_t i = 0; i < whole; i += kLanes) write(y + i, read(x + i) * scale * read(weight + i));
  if (rest) write_some(y + whole, read_some(x + whole, rest) * scale * read_some(weight + whole, rest), rest);
}

template <class T, class W>
void norm_rows(const T *x, const W *weight, T *y, int64_t rows, int64_t width, float epsilon, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < rows; ++row) norm(x + row * width, weight, y + row * width, width, epsilon);
}

// In place. A row is `heads` queries, `kv_heads` keys, and as many values, which stay as they are.
template <class T, class W>
void norm_heads(T *qkv, const W *of_queries, const W *of_keys, int64_t rows, int heads, int kv_heads, int dim,
                float epsilon, int threads) {
  const int64_t width = int64_t(heads + 2 * kv_heads) * dim;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < rows; ++row)
    for (int head = 0; head < heads + kv_heads; ++head) {
      T *x = qkv + row * width + head * dim;
      norm(x, head < heads ? of_queries : of_keys, x, dim, epsilon);
    }
}

}  // namespace
}  // namespace batchwright

using namespace batchwright;

extern "C" {

void norm_float32(const float *x, const float *weight, float *y, int64_t rows, int64_t width, float epsilon,
                  int threads) {
  norm_rows(x, weight, y, rows, width, epsilon, threads);
}
void norm_bfloat16(const bf16 *x, const bf16 *weight, bf16 *y, int64_t rows, int64_t width, float epsilon,
                   int threads) {
  norm_rows(x, weight, y, rows, width, epsilon, threads);
}
void norm_wide_bfloat16(const bf16 *x, const float *weight, bf16 *y, int64_t rows, int64_t width, float epsilon,
                        int threads) {
  norm_rows(x, weight, y, rows, width, epsilon, threads);
}
void norm_heads_float32(float *qkv, const float *of_queries, const float *of_keys, int64_t rows, int heads,
                        int kv_heads, int dim, float epsilon, int threads) {
  norm_heads(qkv, of_queries, of_keys, rows, heads, kv_heads, dim, epsilon, threads);
}
void norm_heads_bfloat16(bf16 *qkv, const bf16 *of_queries, const bf16 *of_keys, int64_t rows, int heads,
                         int kv_heads, int dim, float epsilon, int threads) {
  norm_heads(qkv, of_queries, of_keys, rows, heads, kv_heads, dim, epsilon, threads);
}
void norm_heads_wide_bfloat16(bf16 *qkv, const float *of_queries, const float *of_keys, int64_t rows, int heads,
                              int kv_heads, int dim, float epsilon, int threads) {
  norm_heads(qkv, of_queries, of_keys, rows, heads, kv_heads, dim, epsilon, threads);
}

}  // extern "C"
