// The root-mean-square norm of each row, in float32.

#include "simd.h"

namespace batchwright {
namespace {

template <class T>
void norm(const T *x, const T *weight, T *y, int64_t rows, int64_t width, float epsilon, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    const T *from = x + row * width;
    T *to = y + row * width;
    const int64_t whole = width / kLanes * kLanes;
    const int rest = int(width - whole);
    Floats squares = {};
    for (int64_t i = 0; i < whole; i += kLanes) squares = fused(read(from + i), read(from + i), squares);
    if (rest) squares = fused(read_some(from + whole, rest), read_some(from + whole, rest), squares);
    const Floats scale = splat(1 / std::sqrt(total(squares) / float(width) + epsilon));
    for (int64_t i = 0; i < whole; i += kLanes) write(to + i, read(from + i) * scale * read(weight + i));
    if (rest) write_some(to + whole, read_some(from + whole, rest) * scale * read_some(weight + whole, rest), rest);
  }
}

}  // namespace
}  // namespace batchwright

using namespace batchwright;

extern "C" {

void norm_float32(const float *x, const float *weight, float *y, int64_t rows, int64_t width, float epsilon,
                  int threads) {
  norm(x, weight, y, rows, width, epsilon, threads);
}
void norm_bfloat16(const bf16 *x, const bf16 *weight, bf16 *y, int64_t rows, int64_t width, float epsilon,
                   int threads) {
  norm(x, weight, y, rows, width, epsilon, threads);
}

}  // extern "C"
