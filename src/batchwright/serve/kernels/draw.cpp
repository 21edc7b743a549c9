// Draws a token of each row, from all tokens or from those that filters keep: the inverse of a cumulative distribution.
//
// It is what draws.py and filters.py do, with tokens in the same order, so that both draw the same but for the rounding
// of a power of e. Weights are whole numbers, of which a double holds the sum exactly: no order of adding can matter.
// Nothing is sorted: the token at which a weight is reached is found by halving the range of keys, and few tokens are
// asked, those near enough to the likeliest.

#include "simd.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

namespace batchwright {
namespace {

constexpr int kFold = 256;            // FOLD of draws.py
constexpr int kWeightBits = 34;       // NUM_WEIGHT_BITS of draws.py
constexpr float kWeightless = 25.0f;  // e^-25 * 2^34 rounds to 0
constexpr double kFirstDepth = 4;     // how far below the likeliest token's score candidates are looked for at first,
constexpr double kDeeper = 2.5;       // and how many times as far when these did not do

struct Row {
  const float *logits;
  int64_t width;
  float peak, rate;

  // Shifted before it is scaled: then the highest is 0, and no temperature is small enough for NaN.
  Floats scores(Floats some) const { return (some - splat(peak)) * splat(rate); }

  // 16 logits, or those that are left and -inf.
  Floats some(int64_t from, int64_t end) const {
    if (end - from >= kLanes) return read(logits + from);
    float all[kLanes];
    std::fill(all, all + kLanes, -std::numeric_limits<float>::infinity());
    std::copy(logits + from, logits + end, all);
    return read(all);
  }
  Floats some(int64_t from) const { return some(from, width); }
};

struct Limits {  // of filters.py
  double top_k, top_p, min_p, typical_p;
};

BATCHWRIGHT_INLINE Floats rounded(Floats v) {
  const Floats whole = splat(8388608.0f);  // from 2^23 on, floats are whole numbers
  return v < whole ? v + whole - whole : v;
}

// e^score in whole units of 2^-34; scores are at most 0.
BATCHWRIGHT_INLINE Floats weights_of(Floats scores) {
  const Powers powers = powers_of(larger(scores, splat(-40.0f)));
  const Ints power = powers.exponent() + splat(int32_t(kWeightBits << 23));
  return rounded((Floats)((Ints)fused(powers.slope, powers.rest, splat(1.0f)) + power));
}

struct Sum {
  typedef double Doubles __attribute__((vector_size(64)));
  Doubles low = {}, high = {};

  BATCHWRIGHT_INLINE void add(Floats v) {
#if defined(__AVX512F__)
    low += (Doubles)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)v));
    high += (Doubles)_mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)v, 1)));
#else
    for (int i = 0; i < kLanes / 2; ++i) low[i] += v[i], high[i] += v[i + kLanes / 2];
#endif
  }
  double total() const {
    double all = 0;
    for (int i = 0; i < kLanes / 2; ++i) all += low[i] + high[i];
    return all;
  }
};

// One bit for each lane.
inline unsigned bits_where(Ints holds) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)holds, (__m512i)holds);
#else
  unsigned bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= unsigned(holds[i] & 1) << i;
  return bits;
#endif
}

// Candidates in the order of their ids; behind the last come keys of -inf, to a whole vector.
struct Tokens {
  float *keys, *weights;
  int32_t *ids;
  int64_t count;

  void append(unsigned chosen, Floats some_keys, Floats some_weights, Ints some_ids) {
#if defined(__AVX512F__)
    write(keys + count, (Floats)_mm512_maskz_compress_ps(chosen, (__m512)some_keys));
    write(weights + count, (Floats)_mm512_maskz_compress_ps(chosen, (__m512)some_weights));
    const auto packed = _mm512_maskz_compress_epi32(chosen, (__m512i)some_ids);
    std::memcpy(ids + count, &packed, sizeof packed);
    count += __builtin_popcount(chosen);
#else
    for (; chosen; chosen &= chosen - 1, ++count) {
      const int lane = __builtin_ctz(chosen);
      keys[count] = some_keys[lane], weights[count] = some_weights[lane], ids[count] = some_ids[lane];
    }
#endif
  }
  void end() { write(keys + count, splat(-std::numeric_limits<float>::infinity())); }

  double weight() const {
    Sum sum;
    for (int64_t i = 0; i < count; i += kLanes)
      sum.add(read(keys + i) > splat(-std::numeric_limits<float>::infinity()) ? read(weights + i) : Floats{});
    return sum.total();
  }
};

// Of a row's tokens those whose depth is at most `most`. Ranks says what a token is ranked by, and how deep it lies.
template <class Ranks>
void collect(const Row &row, const Ranks &ranks, float most, Tokens &to) {
  to.count = 0;
  for (int64_t i = 0; i < row.width; i += kLanes) {
    const Floats logits = row.some(i), scores = row.scores(logits);
    const unsigned chosen = bits_where(ranks.depths(scores) <= splat(most));
    if (chosen) to.append(chosen, ranks.keys(logits, scores), weights_of(scores), lane_numbers() + splat(int32_t(i)));
  }
  to.end();
}

struct ByLogit {
  Floats depths(Floats scores) const { return -scores; }
  Floats keys(Floats logits, Floats) const { return logits; }
};

// By how near a token's surprise is to the mean; both beyond the likeliest token's.
struct ByNearness {
  float mean;
  Floats depths(Floats scores) const {
    const Floats beyond = -scores - splat(mean);
    return beyond < 0 ? -beyond : beyond;
  }
  Floats keys(Floats, Floats scores) const { return -depths(scores); }
};

struct Above {
  double weight;
  int64_t count;
};

Above above(const Tokens &tokens, float key) {
  Sum sum;
  int64_t count = 0;
  for (int64_t i = 0; i < tokens.count; i += kLanes) {
    const Ints higher = read(tokens.keys + i) > splat(key);
    sum.add(higher ? read(tokens.weights + i) : Floats{});
    count += __builtin_popcount(bits_where(higher));
  }
  return {sum.total(), count};
}

// Those above a key, or those that aren't; `to` may be `from`.
void part(const Tokens &from, float key, bool is_above, Tokens &to) {
  const int64_t count = from.count;
  to.count = 0;
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats keys = read(from.keys + i), weights = read(from.weights + i);
    const unsigned higher = bits_where(keys > splat(key)), all = (1u << std::min<int64_t>(count - i, kLanes)) - 1;
    to.append(is_above ? higher : all & ~higher, keys, weights, load<Ints>(from.ids + i));
  }
  to.end();
}

// A float's bits as an integer that ascends with it; and back, which is the same.
inline int32_t turned(int32_t bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }

inline int32_t place_of(float key) {
  int32_t bits;
  std::memcpy(&bits, &key, 4);
  return turned(bits);
}

inline float key_at(int32_t place) {
  const int32_t bits = turned(place);
  float key;
  std::memcpy(&key, &bits, 4);
  return key;
}

std::pair<float, float> extremes(const Tokens &tokens) {
  Floats most = splat(-std::numeric_limits<float>::infinity()), least_turned = most;
  for (int64_t i = 0; i < tokens.count; i += kLanes) {
    const Floats keys = read(tokens.keys + i);
    most = larger(keys, most);
    least_turned = larger(keys > splat(-std::numeric_limits<float>::infinity()) ? -keys : keys, least_turned);
  }
  return {-largest(least_turned), largest(most)};
}

// The lowest key for which it holds of what is above it; it holds of nothing. `left`: room for the tokens between the
// keys that are still possible.
template <class Holds>
float lowest(const Tokens &tokens, Tokens &left, const Holds &holds) {
  const auto [least, most] = extremes(tokens);
  int64_t low = place_of(least), high = place_of(most);
  const Tokens *looked_at = &tokens;
  Above beyond{};  // what is above all that are left
  while (low < high) {
    const int64_t middle = (low + high) >> 1;
    const float key = key_at(int32_t(middle));
    const Above within = above(*looked_at, key), all{beyond.weight + within.weight, beyond.count + within.count};
    const bool is_high = !holds(all);
    if (is_high)
      low = middle + 1;
    else
      high = middle, beyond = all;
    part(*looked_at, key, is_high, left);
    looked_at = &left;
  }
  return key_at(int32_t(high));
}

// The first token, in the order of ids, of those with this key for which it holds; or -1.
template <class Holds>
int64_t first_of_equals(const Tokens &tokens, float key, const Holds &holds) {
  for (int64_t i = 0; i < tokens.count; i += kLanes)
    for (unsigned equal = bits_where(read(tokens.keys + i) == splat(key)); equal; equal &= equal - 1) {
      const int64_t index = i + __builtin_ctz(equal);
      if (holds(index)) return index;
    }
  return -1;
}

void drop_below(Tokens &tokens, float key) {
  for (int64_t i = 0; i < tokens.count; i += kLanes)
    write(tokens.weights + i, read(tokens.keys + i) >= splat(key) ? read(tokens.weights + i) : Floats{});
}

// Equals of the k-th stay, in the scores' rounding.
void keep_top_k(const Row &row, double top_k, Tokens &tokens, Tokens &room) {
  if (double(tokens.count) <= top_k) return;
  const float kth = lowest(tokens, room, [&](const Above &above) { return double(above.count) < top_k; });
  const Floats least = row.scores(splat(kth));
  for (int64_t i = 0; i < tokens.count; i += kLanes)
    write(tokens.weights + i, row.scores(read(tokens.keys + i)) >= least ? read(tokens.weights + i) : Floats{});
}

// Those stay before which less than `top_p` of the whole is reached.
void keep_top_p(double top_p, double whole, Tokens &tokens, Tokens &room) {
  const auto is_inside = [&](double before) { return before / whole < top_p; };
  const float key = lowest(tokens, room, [&](const Above &above) { return is_inside(above.weight); });
  double before = above(tokens, key).weight;
  drop_below(tokens, key);
  first_of_equals(tokens, key, [&](int64_t index) {
    const float weight = tokens.weights[index];
    if (!is_inside(before)) tokens.weights[index] = 0;
    before += weight;
    return false;
  });
}

void keep_min_p(double min_p, Tokens &tokens) {
  const double least = std::ldexp(min_p, kWeightBits);
  for (int64_t i = 0; i < tokens.count; ++i)
    if (tokens.weights[i] < least) tokens.weights[i] = 0;
}

double target_of(double uniform, double total) { return std::min(std::floor(uniform * total), total - 1); }

// The id of the token in whose part of the weight the uniform number falls; the highest keys come first.
int64_t pick(const Tokens &tokens, double uniform, Tokens &room) {
  const double target = target_of(uniform, tokens.weight());
  const float key = lowest(tokens, room, [&](const Above &above) { return above.weight <= target; });
  double reached = above(tokens, key).weight;
  return tokens.ids[first_of_equals(tokens, key, [&](int64_t index) {
    reached += tokens.weights[index];
    return reached > target;
  })];
}

double whole_weight(const Row &row) {
  Sum sum;
  for (int64_t i = 0; i < row.width; i += kLanes) sum.add(weights_of(row.scores(row.some(i))));
  return sum.total();
}

int64_t draw_filtered(const Row &row, const Limits &limits, double uniform, Tokens &tokens, Tokens &room) {
  const bool has_top_k = std::isfinite(limits.top_k), has_top_p = std::isfinite(limits.top_p);
  const double whole = has_top_p && !has_top_k ? whole_weight(row) : 0;
  const double deepest =
      has_top_k || limits.min_p == 0 ? kWeightless : std::min<double>(kWeightless, 0.01 - std::log(limits.min_p));
  for (double depth = has_top_k || has_top_p ? kFirstDepth : deepest;; depth *= kDeeper) {
    collect(row, ByLogit{}, float(std::min(depth, deepest)), tokens);
    if (depth >= deepest) break;
    if (has_top_k ? double(tokens.count) >= limits.top_k : tokens.weight() / whole >= limits.top_p) break;
  }
  if (has_top_k) keep_top_k(row, limits.top_k, tokens, room);
  if (has_top_p) keep_top_p(limits.top_p, has_top_k ? tokens.weight() : whole, tokens, room);
  keep_min_p(limits.min_p, tokens);
  return pick(tokens, uniform, room);
}

int64_t draw_typical(const Row &row, double typical_p, double uniform, Tokens &tokens, Tokens &room) {
  Sum weight, surprise;
  for (int64_t i = 0; i < row.width; i += kLanes) {
    const Floats scores = row.scores(row.some(i)), weights = weights_of(scores);
    weight.add(weights);
    surprise.add(rounded(weights * -larger(scores, splat(-40.0f))));  // x * e^-x < 1: exact sums, like those of weights
  }
  const double whole = weight.total();
  const ByNearness ranks{float(surprise.total() / whole)};
  for (double depth = kFirstDepth / kDeeper;; depth *= kDeeper) {
    collect(row, ranks, float(depth), tokens);
    if (depth >= kWeightless || tokens.weight() / whole >= typical_p) break;
  }
  drop_below(tokens, lowest(tokens, room, [&](const Above &above) { return above.weight / whole < typical_p; }));
  return pick(tokens, uniform, room);
}

// Of all tokens, column by column of the row as `draws.py` folds it.
int64_t draw_any(const Row &row, double uniform, std::vector<Sum> &sums) {
  const int64_t num_columns = (row.width + kFold - 1) / kFold;
  sums.assign((num_columns + kLanes - 1) / kLanes, Sum{});
  for (int64_t first = 0; first < row.width; first += num_columns) {
    const int64_t end = std::min(first + num_columns, row.width);
    for (int64_t i = first; i < end; i += kLanes)
      sums[(i - first) / kLanes].add(weights_of(row.scores(row.some(i, end))));
  }
  double total = 0, reached = 0;
  for (const Sum &sum : sums) total += sum.total();
  const double target = target_of(uniform, total);

  const double *const columns = (const double *)sums.data();
  int64_t column = 0;
  while (reached + columns[column] <= target) reached += columns[column++];
  float weights[kFold];
  std::fill(weights, weights + kFold, -std::numeric_limits<float>::infinity());
  for (int64_t i = 0; column + i * num_columns < row.width; ++i) weights[i] = row.logits[column + i * num_columns];
  for (int64_t i = 0; i < kFold; i += kLanes) write(weights + i, weights_of(row.scores(read(weights + i))));
  int64_t within = 0;
  while (reached + weights[within] <= target) reached += weights[within++];
  return within * num_columns + column;
}

// Memory that is kept from step to step: to get it new costs more than to fill it.
class Room {
 public:
  explicit Room(int64_t width) : keys_(width + kLanes), weights_(width + kLanes), ids_(width + kLanes) {}
  int64_t width() const { return int64_t(ids_.size()) - kLanes; }
  Tokens empty() { return {keys_.data(), weights_.data(), ids_.data(), 0}; }

 private:
  std::vector<float> keys_, weights_;
  std::vector<int32_t> ids_;
};

int64_t draw(const Row &row, const Limits &limits, double uniform) {
  thread_local std::vector<Sum> sums;
  thread_local Room first(0), second(0);
  const bool is_limited = std::isfinite(limits.top_k) || std::isfinite(limits.top_p) || limits.min_p > 0;
  if (!is_limited && limits.typical_p == 1) return draw_any(row, uniform, sums);
  if (first.width() < row.width) first = Room(row.width), second = Room(row.width);
  Tokens tokens = first.empty(), room = second.empty();
  return is_limited ? draw_filtered(row, limits, uniform, tokens, room)
                    : draw_typical(row, limits.typical_p, uniform, tokens, room);
}

}  // namespace
}  // namespace batchwright

// Of the rows named in `drawn`. `settings` are five for each of these: one over the temperature, and the limits.
extern "C" void draw_float32(const float *logits, int64_t width, const float *peaks, const int64_t *drawn,
                             int64_t count, const double *settings, const double *uniforms, int64_t *tokens,
                             int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = drawn[i];
    const double *const s = settings + 5 * i;
    tokens[row] = batchwright::draw({logits + row * width, width, peaks[row], float(s[0])},
                                    {s[1], s[2], s[3], s[4]}, uniforms[i]);
  }
}

// The weight of all tokens of each row.
extern "C" void weigh_float32(const float *logits, int64_t rows, int64_t width, const float *peaks, double *weights,
                              int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < rows; ++row)
    weights[row] = batchwright::whole_weight({logits + row * width, width, peaks[row], 1.0f});
}
