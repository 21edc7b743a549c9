// Attention over pages, read where they are: no gathering, no padding to the longest row of the batch.
//
// A page holds, for each key-value head, `size` keys and then as many values, in the order in which a vector takes
// them: keys as [head_dim / width][size][width], values as [size / width][head_dim][width], with width 2 for bfloat16
// and 1 for float32. Thus 16 keys meet a query, and a pair of keys' weights 16 of their values, without a shuffle.
// Keys and values are stored in that order when they are made.
//
// A query sees its keys in spans of 64, counted from the first; largest score, sum of weights and output are carried
// from span to span in float32. Spans lie where they lie whoever else is in the step, and however a prompt was cut
// up, so that a query's output depends on its own context alone. That goes for windows too: a span that a query sees
// nothing of leaves it bit for bit as it was, so it makes no difference whether neighbours had it visited or not.

#include "simd.h"

#include <algorithm>
#include <vector>

namespace batchwright {
namespace {

constexpr int kSpan = 64;                   // keys taken at once, in parts of 16
constexpr int kParts = kSpan / kLanes;
constexpr int kGroup = 4;                   // queries that meet them at once
constexpr int kTile = 16;                   // positions of a prompt in one task
constexpr int kFields = 4;                  // of a row: first position of the step, positions, start, first page
constexpr float kLeast = -std::numeric_limits<float>::infinity();

struct Shape {
  int heads, kv_heads, dim, size;           // `size`: positions in a page
  int64_t head() const { return int64_t(2) * size * dim; }
  int64_t page() const { return kv_heads * head(); }
  int64_t row() const { return int64_t(heads + 2 * kv_heads) * dim; }
};

// What a layer makes of scores q.k. A query sees `window` keys, itself included; `cap` and `window` are 0 for none.
struct Rule {
  float scale, cap;
  int window;
  bool is_plain() const { return !cap && !window; }
  int lowest(int limit) const { return window && limit > window ? limit - window : 0; }  // key that is seen
};

struct Tile {
  const int32_t *pages;
  int64_t first;                            // position of the step
  int start, count;                         // positions of the row
  int row_start, row_end;                   // of the whole chunk
};

std::vector<Tile> tiles_of(const int32_t *rows, int64_t num_rows, const int32_t *tables) {
  std::vector<Tile> tiles;
  for (int64_t row = 0; row < num_rows; ++row) {
    const int32_t *fields = rows + row * kFields;
    for (int from = 0; from < fields[1]; from += kTile)
      tiles.push_back({tables + fields[3], fields[0] + from, fields[2] + from, std::min(kTile, fields[1] - from),
                       fields[2], fields[2] + fields[1]});
  }
  return tiles;
}

// The span with the first key that a tile sees.
inline int first_of(const Rule &rule, const Tile &tile) { return rule.lowest(tile.start + 1) / kSpan * kSpan; }

// Turns neighbouring values of a head as one complex number each. `turns`: cosine and sine of each pair.
template <class T>
inline void rotated(T *head, const float *turns, int dim) {
  for (int i = 0; i < dim; i += 2) {
    const float a = widened(head[i]), b = widened(head[i + 1]), cosine = turns[i], sine = turns[i + 1];
    put(head + i, a * cosine - b * sine);
    put(head + i + 1, a * sine + b * cosine);
  }
}

// What a page that a chunk has begun, and not filled, holds beyond the chunk: its weights are 0, but 0 * NaN is not.
template <class T>
void blank_tail(const Shape &shape, const Tile &tile, T *pages) {
  constexpr int width = Lane<T>::width;
  const int used = tile.row_end % shape.size;
  if (tile.start + tile.count < tile.row_end || !used || tile.row_end - used < tile.row_start) return;
  T *page = pages + tile.pages[tile.row_end / shape.size] * shape.page();
  for (int head = 0; head < shape.kv_heads; ++head) {
    T *values = page + head * shape.head() + shape.size * shape.dim;
    const int whole = (used + width - 1) / width * width;
    std::fill(values + whole * shape.dim, values + shape.size * shape.dim, T{});
    for (int i = used; i < whole; ++i)
      for (int d = 0; d < shape.dim; ++d) values[(i / width * shape.dim + d) * width + i % width] = T{};
  }
}

// `turns`: for `rotated`, by position, or none.
template <class T>
void store(const Shape &shape, const Tile &tile, const float *turns, T *qkv, T *pages) {
  constexpr int width = Lane<T>::width;
  for (int i = 0; i < tile.count; ++i) {
    T *row = qkv + (tile.first + i) * shape.row();
    const int position = tile.start + i, offset = position % shape.size;
    for (int head = 0; turns && head < shape.heads + shape.kv_heads; ++head)
      rotated(row + head * shape.dim, turns + int64_t(position) * shape.dim, shape.dim);
    T *page = pages + tile.pages[position / shape.size] * shape.page();
    for (int head = 0; head < shape.kv_heads; ++head) {
      const T *key = row + (shape.heads + head) * shape.dim, *value = key + shape.kv_heads * shape.dim;
      T *keys = page + head * shape.head(), *values = keys + shape.size * shape.dim;
      for (int d = 0; d < shape.dim; ++d) keys[(d / width * shape.size + offset) * width + d % width] = key[d];
      for (int d = 0; d < shape.dim; ++d) values[(offset / width * shape.dim + d) * width + offset % width] = value[d];
    }
  }
}

// Where 16 keys and values lie: a vector of keys every `key_step` values, one of values every `value_step`.
template <class T>
struct Sixteen {
  const T *keys, *values;
  int key_step, value_step;
};

template <class T>
Sixteen<T> in_place(const Shape &shape, const T *pages, const Tile &tile, int head, int first) {
  constexpr int width = Lane<T>::width;
  const T *keys = pages + tile.pages[first / shape.size] * shape.page() + head * shape.head();
  const int offset = first % shape.size;
  const T *values = keys + (shape.size + offset) * shape.dim;
  return {keys + offset * width, values, shape.size * width, shape.dim * width};
}

// Pages that do not hold a multiple of 16: copied to `room`, of 32 * dim values.
template <class T>
Sixteen<T> copied(const Shape &shape, const T *pages, const Tile &tile, int head, int first, int end, T *room) {
  constexpr int width = Lane<T>::width;
  T *keys = room, *values = room + kLanes * shape.dim;
  std::fill(room, room + 2 * kLanes * shape.dim, T{});
  for (int i = 0; i < kLanes && first + i < end; ++i) {
    const int offset = (first + i) % shape.size;
    const T *from = pages + tile.pages[(first + i) / shape.size] * shape.page() + head * shape.head();
    const T *its_values = from + shape.size * shape.dim;
    for (int d = 0; d < shape.dim; ++d) {
      keys[(d / width * kLanes + i) * width + d % width] = from[(d / width * shape.size + offset) * width + d % width];
      values[(i / width * shape.dim + d) * width + i % width] =
          its_values[(offset / width * shape.dim + d) * width + offset % width];
    }
  }
  return {keys, values, kLanes * width, shape.dim * width};
}

// A task's queries: what they have seen so far, and room for what they share.
template <class T>
struct Task {
  const Shape &shape;
  const Rule &rule;
  std::vector<float> outputs, most, sums;   // of each query
  std::vector<T> room;
  std::vector<const T *> queries;
  std::vector<int> limits;                  // the key that each may not see any more

  Task(const Shape &s, const Rule &r) : shape(s), rule(r), room(2 * kSpan * s.dim) {}
};

template <class T, int Q>
BATCHWRIGHT_INLINE void score(const T *const *queries, int dim, const Sixteen<T> *parts, const Sixteen<T> *next,
                              Floats (&scores)[Q][kParts]) {
  typedef Lane<T> L;
  const T *keys[kParts], *ahead[kParts], *query[Q];
  for (int part = 0; part < kParts; ++part) keys[part] = parts[part].keys, ahead[part] = next[part].keys;
  for (int q = 0; q < Q; ++q) query[q] = queries[q];
  for (int d = 0; d < dim; d += L::width) {
    typename L::Vector vectors[kParts];
    for (int part = 0; part < kParts; ++part) {
      vectors[part] = load<typename L::Vector>(keys[part]);
      __builtin_prefetch(ahead[part], 0, 3);
      keys[part] += parts->key_step, ahead[part] += parts->key_step;
    }
    for (int q = 0; q < Q; ++q) {
      const auto all = L::splat(query[q] + d);
      for (int part = 0; part < kParts; ++part) scores[q][part] = L::add(scores[q][part], vectors[part], all);
    }
  }
}

// Products become scores: scaled, capped, and the least there is for a key that a query does not see. `IsPlain`: there
// is no cap and no window, and they cost nothing.
template <class T, int Q, bool IsPlain>
BATCHWRIGHT_INLINE void judge(const Task<T> &task, int first_query, int first_key, Floats (&scores)[Q][kParts]) {
  const Rule &rule = task.rule;
  const bool has_cap = !IsPlain && rule.cap;
  if (has_cap)
    for (int q = 0; q < Q; ++q)
      for (Floats &score : scores[q]) score = tangent(score * splat(rule.scale / rule.cap));
  for (int q = 0; q < Q; ++q) {
    const int limit = task.limits[first_query + q];
    for (int part = 0; part < kParts; ++part) {
      const Ints keys = lane_numbers() + splat(first_key + part * kLanes);
      Floats score = scores[q][part] * splat(has_cap ? rule.cap : rule.scale);
      if (!IsPlain) score = keys < splat(rule.lowest(limit)) ? splat(kLeast) : score;
      scores[q][part] = keys < splat(limit) ? score : splat(kLeast);
    }
  }
}

// Scores become weights, as T; `fades`: what the sums and outputs so far are multiplied by.
template <class T, int Q>
BATCHWRIGHT_INLINE void weigh(Task<T> &task, int first_query, const Floats (&scores)[Q][kParts],
                              T (&weights)[Q][kSpan], float (&fades)[Q]) {
  Floats change = {};
  float peaks[Q];
  for (int q = 0; q < Q; ++q) {
    const int index = first_query + q;
    Floats most = splat(kLeast);
    for (int part = 0; part < kParts; ++part) most = larger(scores[q][part], most);
    const float before = task.most[index], now = std::max(before, largest(most));
    task.most[index] = now;
    change[q] = before == now ? 0.0f : before - now;
    peaks[q] = now == kLeast ? 0.0f : now;  // a query that has seen no key yet: weights of 0, not e^(-inf + inf)
  }
  const Floats all_fades = exponential(change);
  for (int q = 0; q < Q; ++q) {
    const int index = first_query + q;
    Floats sum = {};
    for (int part = 0; part < kParts; ++part) {
      const Floats weight = exponential(scores[q][part] - splat(peaks[q]));
      sum += weight;
      write(weights[q] + part * kLanes, weight);
    }
    fades[q] = all_fades[q];
    task.sums[index] = task.sums[index] * fades[q] + total(sum);
  }
}

// V vectors of the outputs, from dimension `d` on.
template <class T, int Q, int V>
BATCHWRIGHT_INLINE void add_values(Task<T> &task, int first_query, int d, const T (&weights)[Q][kSpan],
                                   const float (&fades)[Q], const Sixteen<T> *parts, int num_parts,
                                   const Sixteen<T> *next) {
  typedef Lane<T> L;
  float *outputs = &task.outputs[first_query * task.shape.dim + d];
  Floats sums[Q][V];
  for (int q = 0; q < Q; ++q)
    for (int v = 0; v < V; ++v) sums[q][v] = read(outputs + q * task.shape.dim + v * kLanes) * splat(fades[q]);
  for (int part = 0; part < num_parts; ++part) {
    const T *values = parts[part].values + d * L::width, *ahead = next[part].values + d * L::width;
    for (int key = 0; key < kLanes; key += L::width) {
      typename L::Vector vectors[V];
      for (int v = 0; v < V; ++v) {
        vectors[v] = load<typename L::Vector>(values + v * kLanes * L::width);
        __builtin_prefetch(ahead + v * kLanes * L::width, 0, 3);
      }
      values += parts->value_step, ahead += parts->value_step;
      for (int q = 0; q < Q; ++q) {
        const auto weight = L::splat(weights[q] + part * kLanes + key);
        for (int v = 0; v < V; ++v) sums[q][v] = L::add(sums[q][v], vectors[v], weight);
      }
    }
  }
  for (int q = 0; q < Q; ++q)
    for (int v = 0; v < V; ++v) write(outputs + q * task.shape.dim + v * kLanes, sums[q][v]);
}

// Q queries of a task meet a span of keys; `next` is fetched from memory meanwhile.
template <class T, int Q, bool IsPlain>
void see(Task<T> &task, int first_query, int first_key, const Sixteen<T> *parts, int num_parts,
         const Sixteen<T> *next) {
  Floats scores[Q][kParts] = {};
  T weights[Q][kSpan];
  float fades[Q];
  score<T, Q>(&task.queries[first_query], task.shape.dim, parts, next, scores);
  judge<T, Q, IsPlain>(task, first_query, first_key, scores);
  weigh<T, Q>(task, first_query, scores, weights, fades);
  int d = 0;
  for (; d + 4 * kLanes <= task.shape.dim; d += 4 * kLanes)
    add_values<T, Q, 4>(task, first_query, d, weights, fades, parts, num_parts, next);
  for (; d < task.shape.dim; d += kLanes)
    add_values<T, Q, 1>(task, first_query, d, weights, fades, parts, num_parts, next);
}

template <class T, bool IsPlain>
void see_in_groups(Task<T> &task, int first_key, const Sixteen<T> *parts, int num_parts, const Sixteen<T> *next) {
  const int count = int(task.queries.size());
  for (int q = 0; q < count; q += kGroup) {
    switch (std::min(kGroup, count - q)) {
      case 1: see<T, 1, IsPlain>(task, q, first_key, parts, num_parts, next); break;
      case 2: see<T, 2, IsPlain>(task, q, first_key, parts, num_parts, next); break;
      case 3: see<T, 3, IsPlain>(task, q, first_key, parts, num_parts, next); break;
      case 4: see<T, 4, IsPlain>(task, q, first_key, parts, num_parts, next); break;
    }
  }
}

// The span of a row's keys that begins with `first`; how many parts of it there are. The others are never seen.
template <class T>
int span(Task<T> &task, const Tile &tile, int head, int first, const T *pages, Sixteen<T> *parts) {
  const int end = tile.start + tile.count, count = (std::min(kSpan, end - first) + kLanes - 1) / kLanes;
  for (int part = 0; part < kParts; ++part) {
    const int key = first + part * kLanes;
    if (part >= count)
      parts[part] = parts[0];
    else if (task.shape.size % kLanes == 0)
      parts[part] = in_place(task.shape, pages, tile, head, key);
    else
      parts[part] = copied(task.shape, pages, tile, head, key, end, &task.room[part * 2 * kLanes * task.shape.dim]);
  }
  return count;
}

template <class T>
void begin(Task<T> &task, const Tile &tile, int head, const T *qkv) {
  const Shape &shape = task.shape;
  const int sharing = shape.heads / shape.kv_heads;
  task.queries.clear();
  task.limits.clear();
  for (int i = 0; i < tile.count; ++i)
    for (int g = 0; g < sharing; ++g) {
      task.queries.push_back(qkv + (tile.first + i) * shape.row() + (head * sharing + g) * shape.dim);
      task.limits.push_back(tile.start + i + 1);
    }
  task.outputs.assign(task.queries.size() * shape.dim, 0);
  task.most.assign(task.queries.size(), kLeast);
  task.sums.assign(task.queries.size(), 0);
}

template <class T>
void end(const Task<T> &task, const Tile &tile, int head, T *out) {
  const Shape &shape = task.shape;
  const int sharing = shape.heads / shape.kv_heads;
  for (size_t q = 0; q < task.queries.size(); ++q) {
    T *to = out + (tile.first + q / sharing) * shape.heads * shape.dim + (head * sharing + q % sharing) * shape.dim;
    const Floats share = splat(1.0f / task.sums[q]);
    for (int d = 0; d < shape.dim; d += kLanes) write(to + d, read(&task.outputs[q * shape.dim + d]) * share);
  }
}

// One head of a tile. Meanwhile the first span of `following`, which most likely comes next, is fetched.
template <class T>
void attend(Task<T> &task, const Tile &tile, int head, const Tile &following, int following_head, const T *qkv,
            const T *pages, T *out) {
  const bool may_fetch = task.shape.size % kLanes == 0;
  Sixteen<T> parts[kParts], next[kParts];
  const int begun = first_of(task.rule, tile);
  int count = span(task, tile, head, begun, pages, parts);
  begin(task, tile, head, qkv);
  for (int first = begun; first < tile.start + tile.count; first += kSpan) {
    const bool is_last = first + kSpan >= tile.start + tile.count;
    const Tile &then = is_last ? following : tile;
    const int then_head = is_last ? following_head : head;
    const int then_first = is_last ? first_of(task.rule, following) : first + kSpan;
    std::copy(parts, parts + kParts, next);
    int next_count = count;
    if (may_fetch) next_count = span(task, then, then_head, then_first, pages, next);
    if (task.rule.is_plain())
      see_in_groups<T, true>(task, first, parts, count, next);
    else
      see_in_groups<T, false>(task, first, parts, count, next);
    if (is_last) break;
    if (!may_fetch) next_count = span(task, tile, head, first + kSpan, pages, next);
    std::copy(next, next + kParts, parts);
    count = next_count;
  }
  end(task, tile, head, out);
}

// Stores the keys and values of all positions of a step in a layer's pages, then lets all its queries attend.
template <class T>
void step(T *qkv, const float *turns, T *pages, T *out, const int32_t *rows, int64_t num_rows,
          const int32_t *tables, const Shape &shape, const Rule &rule, int threads) {
  const std::vector<Tile> tiles = tiles_of(rows, num_rows, tables);
  const int64_t num_tiles = int64_t(tiles.size()), tasks = num_tiles * shape.kv_heads;
  const int64_t at_once = std::max<int64_t>(1, std::min<int64_t>(4, tasks / (4 * threads)));  // neighbours, prefetched
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < num_tiles; ++i) {
      blank_tail(shape, tiles[i], pages);
      store(shape, tiles[i], turns, qkv, pages);
    }
    Task<T> task(shape, rule);
#pragma omp for schedule(dynamic, at_once)
    for (int64_t i = 0; i < tasks; ++i) {
      const int64_t next = i + 1 < tasks ? i + 1 : i, heads = shape.kv_heads;
      attend(task, tiles[i / heads], int(i % heads), tiles[next / heads], int(next % heads), qkv, pages, out);
    }
  }
}

}  // namespace
}  // namespace batchwright

using namespace batchwright;

extern "C" {

void attend_float32(float *qkv, const float *turns, float *pages, float *out, const int32_t *rows, int64_t num_rows,
                    const int32_t *tables, int heads, int kv_heads, int dim, int size, float scale, float cap,
                    int window, int threads) {
  step(qkv, turns, pages, out, rows, num_rows, tables, {heads, kv_heads, dim, size}, {scale, cap, window}, threads);
}
void attend_bfloat16(bf16 *qkv, const float *turns, bf16 *pages, bf16 *out, const int32_t *rows, int64_t num_rows,
                     const int32_t *tables, int heads, int kv_heads, int dim, int size, float scale, float cap,
                     int window, int threads) {
  step(qkv, turns, pages, out, rows, num_rows, tables, {heads, kv_heads, dim, size}, {scale, cap, window}, threads);
}

}  // extern "C"
