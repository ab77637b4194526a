// The products of attention's blocks with torch's kernels for small blocks: bfloat16 with tiles
// (AMX), float32 with vectors. In bfloat16 the right operand is packed: elements of two consecutive
// rows alternate. Sums of products are float32.
#pragma once

#include "base/parallel.h"

#include "attention/products.h"

namespace symm_cp {

// Row-major C (m, n) = A (m, k) B (k, n), plus C when `adds`; B is packed, k is even.
inline void multiply_packed(int64_t m, int64_t n, int64_t k, const BFloat16* a, int64_t a_stride,
                            const BFloat16* b, int64_t b_stride, bool adds, float* c,
                            int64_t c_stride) {
  if (m == 0 || n == 0) return;
  at::native::cpublas::brgemm(m, n, k, a_stride, b_stride, c_stride, adds,
                              reinterpret_cast<const at::BFloat16*>(a),
                              reinterpret_cast<const at::BFloat16*>(b), c);
}

inline const uint16_t* bits_of(const BFloat16* data) {
  return reinterpret_cast<const uint16_t*>(data);
}
inline uint16_t* bits_of(BFloat16* data) { return reinterpret_cast<uint16_t*>(data); }

// The elements of a row in a tile.
inline constexpr int64_t kTileElements = 32;

inline int64_t padded(int64_t count) {
  return round_up(std::max<int64_t>(count, 1), kTileElements);
}

#if defined(CPUBLAS_BRGEMM_F32F32F32)
inline void transpose_floats(const float* in, int64_t in_stride, int64_t rows, int64_t columns,
                             float* out, int64_t out_stride) {
  transpose(reinterpret_cast<const uint32_t*>(in), in_stride, rows, columns,
            reinterpret_cast<uint32_t*>(out), out_stride);
}

// Row-major C (m, n) = A (m, k) B (k, n), plus C when `adds`.
inline void multiply_block(int64_t m, int64_t n, int64_t k, const float* a, int64_t a_stride,
                           const float* b, int64_t b_stride, bool adds, float* c,
                           int64_t c_stride) {
  at::native::cpublas::brgemm(m, n, k, a_stride, b_stride, c_stride, adds, a, b, c, false);
}

// Whether torch multiplies small blocks of float32 without packing them first.
inline bool multiplies_blocks() {
  static const bool can = [] {
    try {
      const float one = 1;
      float product = 0;
      at::native::cpublas::brgemm(1, 1, 1, 1, 1, 1, false, &one, &one, &product, false);
      at::native::cpublas::brgemm_release(false);
      return product == 1;
    } catch (const c10::Error&) {
      return false;
    }
  }();
  return can;
}

// The floats of a cache line: blocks that begin with a line are read fastest.
inline constexpr int64_t kLineFloats = 16;

// The forward pass in float32 with these products, which are nearly as fast in small blocks as in
// large ones.
class BlockedForward {
 public:
  using Number = float;
  using Weight = float;
  static constexpr int64_t kAlign = 1;
  static constexpr int64_t kStart = kLineFloats;
  static constexpr int64_t kBandRows = 32;
  // Under a narrow band a task transposes this many keys at a time, which then stay in its cache:
  // several times the number of keys that a block of rows sees.
  static constexpr int64_t kSpan = 2048;

  // All keys, transposed; none under a narrow band.
  struct Shared {
    Shared(const TileInputs<float>& inputs, bool is_narrow)
        : in(inputs),
          narrow(is_narrow),
          // Not a power of two, so that rows of it do not share few places of the cache.
          key_stride(padded(narrow ? std::min(in.sizes.keys, kSpan) : in.sizes.keys) + 16),
          key_size(in.sizes.features * key_stride),
          keys(narrow ? 0 : in.sizes.samples * in.sizes.groups * key_size) {
      if (narrow) return;
      const TileSizes& sizes = in.sizes;
      parallel_for(0, sizes.samples * sizes.groups, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
          transpose_floats(in.key.at(i / sizes.groups, i % sizes.groups, 0), in.key.row, sizes.keys,
                           sizes.features, keys.get() + i * key_size, key_stride);
      });
    }

    const TileInputs<float>& in;
    bool narrow;
    int64_t key_stride, key_size;
    Scratch<float> keys;
  };

  BlockedForward(const Shared& shared, int64_t)
      : shared_(shared), span_(shared.narrow ? shared.key_size : 0) {}
  ~BlockedForward() { at::native::cpublas::brgemm_release(false); }
  BlockedForward(const BlockedForward&) = delete;
  BlockedForward& operator=(const BlockedForward&) = delete;

  void enter_rows(int64_t b, int64_t h, int64_t first, int64_t count) {
    const TileInputs<float>& in = shared_.in;
    b_ = b, g_ = in.sizes.group_of(h), rows_ = count;
    query_ = in.query.at(b, h, first);
  }

  void scores(int64_t first, int64_t columns, float* out, int64_t stride) {
    const TileInputs<float>& in = shared_.in;
    multiply_block(rows_, columns, in.sizes.features, query_, in.query.row,
                   keys_from(first, columns), shared_.key_stride, false, out, stride);
  }

  void add_values(int64_t first, int64_t columns, const float* weights, int64_t stride, bool adds,
                  float* out) {
    const TileInputs<float>& in = shared_.in;
    const int64_t features = in.sizes.value_features;
    multiply_block(rows_, features, columns, weights, stride, in.value.at(b_, g_, first),
                   in.value.row, adds, out, features);
  }

 private:
  // Returns transposed keys: at least `columns` from `first` on.
  const float* keys_from(int64_t first, int64_t columns) {
    const TileInputs<float>& in = shared_.in;
    const int64_t group = b_ * in.sizes.groups + g_;
    if (!shared_.narrow) return shared_.keys.get() + group * shared_.key_size + first;
    if (group != span_group_ || first < span_begin_ || first + columns > span_end_) {
      span_group_ = group, span_begin_ = first;
      span_end_ = std::min(first + kSpan, in.sizes.keys);
      transpose_floats(in.key.at(b_, g_, first), in.key.row, span_end_ - first, in.sizes.features,
                       span_.get(), shared_.key_stride);
    }
    return span_.get() + first - span_begin_;
  }

  const Shared& shared_;
  Scratch<float> span_;
  int64_t span_group_ = -1, span_begin_ = 0, span_end_ = 0;
  const float* query_ = nullptr;
  int64_t b_ = 0, g_ = 0, rows_ = 0;
};

// The backward pass in float32; sums over rows as in `PackedBackward`.
class BlockedBackward {
 public:
  using Number = float;
  using Weight = float;
  static constexpr int64_t kAlign = 1;
  static constexpr int64_t kStart = kLineFloats;
  static constexpr int64_t kBandRows = 32;
  static constexpr bool kRolls = true;

  BlockedBackward(const TileInputs<float>& inputs, const TileGradients<float>& grads, int64_t b,
                  int64_t g, int64_t most_rows, int64_t most_columns)
      : in_(inputs),
        grads_(grads),
        b_(b),
        g_(g),
        row_stride_(padded(most_rows) + 16),
        key_stride_(padded(most_columns) + 16),
        keys_(in_.sizes.features * key_stride_),
        values_(in_.sizes.value_features * key_stride_),
        query_columns_(in_.sizes.features * row_stride_),
        grad_columns_(in_.sizes.value_features * row_stride_),
        grad_keys_(in_.sizes.features * key_stride_),
        grad_values_(in_.sizes.value_features * key_stride_) {}
  ~BlockedBackward() { at::native::cpublas::brgemm_release(false); }
  BlockedBackward(const BlockedBackward&) = delete;
  BlockedBackward& operator=(const BlockedBackward&) = delete;

  void enter_keys(int64_t first, int64_t columns) {
    key_ = first, columns_ = columns;
    load(0);
  }

  // Makes keys `begin` to `end` held, up to `capacity` keys from `begin` on; writes the gradients
  // of the keys before `begin`. Neither `begin` nor `end` decreases from call to call.
  void roll_keys(int64_t begin, int64_t end, int64_t capacity) {
    if (end <= key_ + columns_) return;
    const int64_t done = std::min(begin - key_, columns_), kept = columns_ - done;
    flush(done);
    for (float* buffer : {keys_.get(), grad_keys_.get()})
      move_columns(buffer, in_.sizes.features, done, kept);
    for (float* buffer : {values_.get(), grad_values_.get()})
      move_columns(buffer, in_.sizes.value_features, done, kept);
    key_ = begin, columns_ = std::min(capacity, in_.sizes.keys - begin);
    load(kept);
  }
  int64_t first_key() const { return key_; }
  int64_t held_keys() const { return columns_; }

  void enter_rows(int64_t h, int64_t first, int64_t count) {
    const TileSizes& sizes = in_.sizes;
    h_ = h, row_ = first, rows_ = count;
    query_ = in_.query.at(b_, h, first), grad_out_ = in_.grad_out.at(b_, h, first);
    transpose_floats(query_, in_.query.row, count, sizes.features, query_columns_.get(),
                     row_stride_);
    transpose_floats(grad_out_, in_.grad_out.row, count, sizes.value_features, grad_columns_.get(),
                     row_stride_);
  }

  void products(int64_t first, int64_t columns, float* scores, float* through, int64_t stride) {
    multiply_block(rows_, columns, in_.sizes.features, query_, in_.query.row, keys_.get() + first,
                   key_stride_, false, scores, stride);
    multiply_block(rows_, columns, in_.sizes.value_features, grad_out_, in_.grad_out.row,
                   values_.get() + first, key_stride_, false, through, stride);
  }

  void add_gradients(int64_t first, int64_t columns, const float* weights, const float* back,
                     int64_t stride) {
    const TileSizes& sizes = in_.sizes;
    multiply_block(sizes.value_features, columns, rows_, grad_columns_.get(), row_stride_, weights,
                   stride, true, grad_values_.get() + first, key_stride_);
    multiply_block(sizes.features, columns, rows_, query_columns_.get(), row_stride_, back, stride,
                   true, grad_keys_.get() + first, key_stride_);
    multiply_block(rows_, sizes.features, columns, back, stride, in_.key.at(b_, g_, key_ + first),
                   in_.key.row, true, grads_.query.at(b_, h_, row_), grads_.query.row);
  }

  void leave_keys() { flush(columns_); }

 private:
  // Loads keys and values from a column on, and sets their gradients to 0.
  void load(int64_t first) {
    const int64_t count = columns_ - first, key = key_ + first;
    const int64_t features = in_.sizes.features, value_features = in_.sizes.value_features;
    transpose_floats(in_.key.at(b_, g_, key), in_.key.row, count, features, keys_.get() + first,
                     key_stride_);
    transpose_floats(in_.value.at(b_, g_, key), in_.value.row, count, value_features,
                     values_.get() + first, key_stride_);
    for (int64_t i = 0; i < features; ++i)
      std::fill_n(grad_keys_.get() + i * key_stride_ + first, count, 0.0f);
    for (int64_t i = 0; i < value_features; ++i)
      std::fill_n(grad_values_.get() + i * key_stride_ + first, count, 0.0f);
  }

  // Adds the gradients of the first columns to the results.
  void flush(int64_t columns) {
    add_transposed(grad_keys_.get(), key_stride_, in_.sizes.features, columns,
                   grads_.key.at(b_, g_, key_), grads_.key.row);
    add_transposed(grad_values_.get(), key_stride_, in_.sizes.value_features, columns,
                   grads_.value.at(b_, g_, key_), grads_.value.row);
  }

  // Moves `count` columns to the front.
  void move_columns(float* buffer, int64_t rows, int64_t first, int64_t count) const {
    for (int64_t i = 0; i < rows; ++i) {
      float* row = buffer + i * key_stride_;
      std::copy_n(row + first, count, row);
    }
  }

  const TileInputs<float>& in_;
  const TileGradients<float>& grads_;
  int64_t b_, g_, row_stride_, key_stride_;
  Scratch<float> keys_, values_, query_columns_, grad_columns_, grad_keys_, grad_values_;
  const float *query_ = nullptr, *grad_out_ = nullptr;
  int64_t h_ = 0, key_ = 0, columns_ = 0, row_ = 0, rows_ = 0;
};
#endif

class PackedForward {
 public:
  using Number = float;
  using Weight = BFloat16;
  static constexpr int64_t kAlign = kTileElements;
  static constexpr int64_t kStart = kTileElements;
  static constexpr int64_t kBandRows = 32;

  // All keys and values, packed.
  struct Shared {
    Shared(const TileInputs<BFloat16>& inputs, bool)
        : in(inputs),
          features(padded(in.sizes.features)),
          // Not a power of two, so that rows of it do not share few places of the cache.
          key_stride(padded(in.sizes.keys) + 16),
          key_size(features * key_stride),
          value_size(padded(in.sizes.keys) * in.sizes.value_features),
          keys(in.sizes.samples * in.sizes.groups * key_size),
          values(in.sizes.samples * in.sizes.groups * value_size) {
      const TileSizes& sizes = in.sizes;
      parallel_for(0, sizes.samples * sizes.groups, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const int64_t b = i / sizes.groups, g = i % sizes.groups;
          transpose_pairs(bits_of(in.key.at(b, g, 0)), in.key.row, sizes.keys, sizes.features,
                          bits_of(keys.get() + i * key_size), key_stride, features);
          interleave_rows(bits_of(in.value.at(b, g, 0)), in.value.row, sizes.keys,
                          sizes.value_features, bits_of(values.get() + i * value_size),
                          sizes.value_features, padded(sizes.keys));
        }
      });
    }

    const TileInputs<BFloat16>& in;
    int64_t features, key_stride, key_size, value_size;
    Scratch<BFloat16> keys, values;
  };

  PackedForward(const Shared& shared, int64_t most_rows)
      : shared_(shared), query_(most_rows * shared.features) {}
  ~PackedForward() { at::native::cpublas::brgemm_release(); }
  PackedForward(const PackedForward&) = delete;
  PackedForward& operator=(const PackedForward&) = delete;

  void enter_rows(int64_t b, int64_t h, int64_t first, int64_t count) {
    const TileInputs<BFloat16>& in = shared_.in;
    group_ = b * in.sizes.groups + in.sizes.group_of(h);
    rows_ = count;
    copy_rows(bits_of(in.query.at(b, h, first)), in.query.row, count, in.sizes.features,
              bits_of(query_.get()), shared_.features);
  }

  void scores(int64_t first, int64_t columns, float* out, int64_t stride) {
    const BFloat16* keys = shared_.keys.get() + group_ * shared_.key_size + first * 2;
    multiply_packed(rows_, columns, shared_.features, query_.get(), shared_.features, keys,
                    shared_.key_stride, false, out, stride);
  }

  void add_values(int64_t first, int64_t columns, const BFloat16* weights, int64_t stride,
                  bool adds, float* out) {
    const int64_t features = shared_.in.sizes.value_features;
    const BFloat16* values = shared_.values.get() + group_ * shared_.value_size + first * features;
    multiply_packed(rows_, features, columns, weights, stride, values, features, adds, out,
                    features);
  }

 private:
  const Shared& shared_;
  Scratch<BFloat16> query_;
  int64_t group_ = 0, rows_ = 0;
};

// Sums the gradients of keys and values in transposed form: weights and gradients of products are
// then right operands, whose rows are easily paired.
class PackedBackward {
 public:
  using Number = float;
  using Weight = BFloat16;
  static constexpr int64_t kAlign = kTileElements;
  static constexpr int64_t kStart = kTileElements;
  static constexpr int64_t kBandRows = symm_cp::kBandRows;
  static constexpr bool kRolls = false;

  PackedBackward(const TileInputs<BFloat16>& inputs, const TileGradients<float>& grads, int64_t b,
                 int64_t g, int64_t most_rows, int64_t most_columns)
      : in_(inputs),
        grads_(grads),
        b_(b),
        g_(g),
        features_(padded(in_.sizes.features)),
        value_features_(padded(in_.sizes.value_features)),
        most_rows_(padded(most_rows)),
        // Not a power of two, as above.
        key_stride_(padded(most_columns) + 16),
        keys_packed_(features_ * key_stride_),
        values_packed_(value_features_ * key_stride_),
        keys_paired_(padded(most_columns) * in_.sizes.features),
        query_(most_rows_ * features_),
        grad_out_(most_rows_ * value_features_),
        query_columns_(most_rows_ * in_.sizes.features),
        grad_columns_(most_rows_ * in_.sizes.value_features),
        paired_(most_rows_ * padded(most_columns)),
        grad_keys_(in_.sizes.features * key_stride_),
        grad_values_(in_.sizes.value_features * key_stride_) {}
  ~PackedBackward() { at::native::cpublas::brgemm_release(); }
  PackedBackward(const PackedBackward&) = delete;
  PackedBackward& operator=(const PackedBackward&) = delete;

  void enter_keys(int64_t first, int64_t columns) {
    const TileSizes& sizes = in_.sizes;
    key_ = first, columns_ = columns;
    const BFloat16 *key = in_.key.at(b_, g_, first), *value = in_.value.at(b_, g_, first);
    transpose_pairs(bits_of(key), in_.key.row, columns, sizes.features, bits_of(keys_packed_.get()),
                    key_stride_, features_);
    transpose_pairs(bits_of(value), in_.value.row, columns, sizes.value_features,
                    bits_of(values_packed_.get()), key_stride_, value_features_);
    interleave_rows(bits_of(key), in_.key.row, columns, sizes.features, bits_of(keys_paired_.get()),
                    sizes.features, padded(columns));
    std::fill_n(grad_keys_.get(), sizes.features * key_stride_, 0.0f);
    std::fill_n(grad_values_.get(), sizes.value_features * key_stride_, 0.0f);
  }

  void enter_rows(int64_t h, int64_t first, int64_t count) {
    const TileSizes& sizes = in_.sizes;
    h_ = h, row_ = first, rows_ = count;
    const BFloat16 *query = in_.query.at(b_, h, first), *grad = in_.grad_out.at(b_, h, first);
    copy_rows(bits_of(query), in_.query.row, count, sizes.features, bits_of(query_.get()),
              features_);
    copy_rows(bits_of(grad), in_.grad_out.row, count, sizes.value_features,
              bits_of(grad_out_.get()), value_features_);
    transpose(bits_of(query), in_.query.row, count, sizes.features, bits_of(query_columns_.get()),
              most_rows_, padded(count));
    transpose(bits_of(grad), in_.grad_out.row, count, sizes.value_features,
              bits_of(grad_columns_.get()), most_rows_, padded(count));
  }

  void products(int64_t first, int64_t columns, float* scores, float* through, int64_t stride) {
    multiply_packed(rows_, columns, features_, query_.get(), features_,
                    keys_packed_.get() + 2 * first, key_stride_, false, scores, stride);
    multiply_packed(rows_, columns, value_features_, grad_out_.get(), value_features_,
                    values_packed_.get() + 2 * first, key_stride_, false, through, stride);
  }

  void add_gradients(int64_t first, int64_t columns, const BFloat16* weights, const BFloat16* back,
                     int64_t stride) {
    const TileSizes& sizes = in_.sizes;
    const int64_t terms = padded(rows_);
    const auto add = [&](const BFloat16* left, int64_t features, const BFloat16* right, float* to) {
      interleave_rows(bits_of(right), stride, rows_, columns, bits_of(paired_.get()), columns,
                      terms);
      multiply_packed(features, columns, terms, left, most_rows_, paired_.get(), columns, true,
                      to + first, key_stride_);
    };
    add(grad_columns_.get(), sizes.value_features, weights, grad_values_.get());
    add(query_columns_.get(), sizes.features, back, grad_keys_.get());
    multiply_packed(rows_, sizes.features, columns, back, stride,
                    keys_paired_.get() + first * sizes.features, sizes.features, true,
                    grads_.query.at(b_, h_, row_), grads_.query.row);
  }

  void leave_keys() {
    add_transposed(grad_keys_.get(), key_stride_, in_.sizes.features, columns_,
                   grads_.key.at(b_, g_, key_), grads_.key.row);
    add_transposed(grad_values_.get(), key_stride_, in_.sizes.value_features, columns_,
                   grads_.value.at(b_, g_, key_), grads_.value.row);
  }

 private:
  const TileInputs<BFloat16>& in_;
  const TileGradients<float>& grads_;
  int64_t b_, g_, features_, value_features_, most_rows_, key_stride_;
  Scratch<BFloat16> keys_packed_, values_packed_, keys_paired_;
  Scratch<BFloat16> query_, grad_out_, query_columns_, grad_columns_, paired_;
  Scratch<float> grad_keys_, grad_values_;
  int64_t h_ = 0, key_ = 0, columns_ = 0, row_ = 0, rows_ = 0;
};

}  // namespace symm_cp
