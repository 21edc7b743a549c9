// -inf for every value whose bit is not set: bit i % 32 of word i / 32 of the row's words.

#include "simd.h"

#include <algorithm>

namespace batchwright {
namespace {

constexpr int kBits = 32;

void mask(float *row, int64_t width, const uint32_t *words) {
  const Floats ruled_out = splat(-std::numeric_limits<float>::infinity());
  for (int64_t i = 0; i < width; i += kBits, ++words) {
    if (*words == ~0u) continue;
    for (int half = 0; half < kBits; half += kLanes) {
      const int64_t left = std::min<int64_t>(width - i - half, kLanes);
      if (left <= 0) break;
      float *const at = row + i + half;
      const Ints is_set = (splat(int32_t(*words >> half)) >> lane_numbers()) & splat(int32_t(1));
      if (left == kLanes)
        write(at, is_set ? read(at) : ruled_out);
      else
        write_some(at, is_set ? read_some(at, int(left)) : ruled_out, int(left));
    }
  }
}

}  // namespace
}  // namespace batchwright

extern "C" void mask_float32(float *x, int64_t rows, int64_t width, const uint32_t *words, int threads) {
  const int64_t num_words = (width + batchwright::kBits - 1) / batchwright::kBits;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < rows; ++row) batchwright::mask(x + row * width, width, words + row * num_words);
}
