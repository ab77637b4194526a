// The terms of attention's scores in one tile, by rows and blocks of columns: which keys a row
// sees, masks, biases by distance, dropout. See symm_cp/ops/attention/native_tiles.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "attention/philox.h"
#include "attention/rows.h"

namespace symm_cp {

struct Columns {
  int64_t begin, end;
};

// Columns of keys at consecutive positions of the sequence, from `position` on.
struct KeyRun {
  int64_t begin, end, position;
};

// A tensor by sample, head and row; strides are in elements, 0 in repeated dimensions.
template <class T>
struct Strided {
  T* data = nullptr;
  int64_t sample = 0, head = 0, row = 0;

  T* at(int64_t b, int64_t h, int64_t i) const { return data + b * sample + h * head + i * row; }
};

// The whole tile, for all samples and heads.
template <class A>
struct TileTerms {
  A scale = 1, softcap = 0, kept_factor = 1;
  int64_t low, high;  // query i sees key j when low <= j - i <= high
  Strided<const A> mask;
  int64_t mask_step = 0;
  const A* bias = nullptr;  // (heads, distances)
  int64_t distances = 0, bias_zero = 0;
  const int64_t* query_positions = nullptr;  // null: 0, 1, 2 ...
  std::vector<KeyRun> runs;                  // of all keys, in order
  bool drops = false;
  Dropout dropout{};
  int64_t sample_offset = 0, head_offset = 0;

  // Return the keys seen by at least one of these rows, and the rows that see at least one of these
  // keys.
  Columns keys_of(int64_t first_row, int64_t last_row, int64_t keys) const {
    return {std::clamp<int64_t>(first_row + low, 0, keys),
            std::clamp<int64_t>(last_row + high + 1, 0, keys)};
  }
  Columns rows_of(int64_t first_key, int64_t last_key, int64_t rows) const {
    return {std::clamp<int64_t>(first_key - high, 0, rows),
            std::clamp<int64_t>(last_key - low + 1, 0, rows)};
  }
};

// The terms of rows in one block of columns at a time. Holds the buffers for a row.
template <class A>
class BlockTerms {
 public:
  BlockTerms(const TileTerms<A>& tile, int64_t most_columns) : tile_(tile) {
    if (tile.drops) kept_.resize(static_cast<size_t>(most_columns / 8 + kPhiloxKeys / 8 + 16));
    if (tile.bias != nullptr && tile.runs.size() > 1)
      bias_.resize(static_cast<size_t>(most_columns));
  }

  // Columns `first` to `first + seen` are keys; no row sees the columns from there to `first +
  // columns`.
  void enter(int64_t first, int64_t seen, int64_t columns) {
    first_ = first;
    seen_ = seen;
    columns_ = columns;
    runs_.clear();
    if (!tile_.drops && tile_.bias == nullptr) return;
    for (const KeyRun& run : tile_.runs) {
      const int64_t begin = std::max(run.begin, first), end = std::min(run.end, first + seen);
      if (begin < end)
        runs_.push_back({begin - first, end - first, run.position + begin - run.begin});
    }
  }

  // Valid until the next call.
  RowTerms<A> row(int64_t b, int64_t h, int64_t i) {
    RowTerms<A> terms{};
    terms.scale = tile_.scale;
    terms.softcap = tile_.softcap;
    terms.columns = columns_;
    terms.begin = std::clamp<int64_t>(i + tile_.low - first_, 0, seen_);
    terms.end = std::clamp<int64_t>(i + tile_.high + 1 - first_, terms.begin, seen_);
    if (tile_.mask.data != nullptr) {
      terms.mask = tile_.mask.at(b, h, i) + first_ * tile_.mask_step;
      terms.mask_step = tile_.mask_step;
    }
    const int64_t position = tile_.query_positions == nullptr ? i : tile_.query_positions[i];
    if (tile_.bias != nullptr) terms.bias = bias_of(h, position);
    if (tile_.drops) {
      keep(tile_.sample_offset + b, tile_.head_offset + h, position, terms.begin, terms.end);
      terms.kept = kept_.data();
      terms.kept_factor = tile_.kept_factor;
    }
    return terms;
  }

  // Adds the gradients of a row's biases to `grad_bias`, the gradient of the head's bias.
  void add_grad_bias(const A* grads, const RowTerms<A>& terms, int64_t i, A* grad_bias) const {
    const int64_t position = tile_.query_positions == nullptr ? i : tile_.query_positions[i];
    for (const KeyRun& run : runs_) {
      A* to = grad_bias + run.position - run.begin - position + tile_.bias_zero;
      const int64_t end = std::min(run.end, terms.end);
      for (int64_t c = std::max(run.begin, terms.begin); c < end; ++c) to[c] += grads[c];
    }
  }

 private:
  // Returns the bias by column, collected in a buffer if the columns are not consecutive keys.
  const A* bias_of(int64_t h, int64_t position) {
    const A* head = tile_.bias + h * tile_.distances + tile_.bias_zero - position;
    if (runs_.size() == 1) return head + runs_[0].position - runs_[0].begin;
    for (const KeyRun& run : runs_)
      std::copy_n(head + run.position, run.end - run.begin, bias_.data() + run.begin);
    return bias_.data();
  }

  void keep(int64_t sample, int64_t head, int64_t query, int64_t first_column,
            int64_t last_column) {
    std::fill(kept_.begin(), kept_.end(), uint8_t{0});
    uint8_t group[kPhiloxKeys / 8 + 8] = {};  // longer than the bits: reads go beyond their end
    for (const KeyRun& run : runs_) {
      int64_t column = std::max(run.begin, first_column);
      const int64_t end = std::min(run.end, last_column);
      while (column < end) {
        const int64_t key = run.position + column - run.begin, skipped = key % kPhiloxKeys;
        const int64_t count = std::min(end - column, kPhiloxKeys - skipped);
        uint16_t bits[kPhiloxKeys / 16];
        tile_.dropout.keep(static_cast<uint32_t>(sample), static_cast<uint32_t>(head),
                           static_cast<uint32_t>(query), key / kPhiloxKeys, bits);
        std::memcpy(group, bits, sizeof(bits));
        add_bits(group, skipped, column, count);
        column += count;
      }
    }
  }

  // Copies `count` bits of `from`, from bit `begin` on, to kept_, from bit `to` on, where all bits
  // are 0.
  void add_bits(const uint8_t* from, int64_t begin, int64_t to, int64_t count) {
    for (int64_t done = 0; done < count; done += 32) {
      uint64_t bits, old;
      std::memcpy(&bits, from + (begin + done) / 8, sizeof(bits));
      bits = bits >> ((begin + done) % 8) & 0xffffffff;
      if (count - done < 32) bits &= (uint64_t{1} << (count - done)) - 1;
      uint8_t* at = kept_.data() + (to + done) / 8;
      std::memcpy(&old, at, sizeof(old));
      old |= bits << ((to + done) % 8);
      std::memcpy(at, &old, sizeof(old));
    }
  }

  const TileTerms<A>& tile_;
  int64_t first_ = 0, seen_ = 0, columns_ = 0;
  std::vector<KeyRun> runs_;  // of the block, by its columns
  std::vector<A> bias_;
  std::vector<uint8_t> kept_;
};

}  // namespace symm_cp
