// The passes over a tile, block by block: flash attention. Source: FlashAttention-2 (Dao, 2023).
#pragma once

#include "base/parallel.h"

#include <cmath>
#include <limits>
#include <optional>

#include "attention/packed.h"

namespace symm_cp {

// Rows and columns of a block.
constexpr int64_t kRows = 128, kColumns = 512;
// Under a narrow band a backward pass sums up the gradients of this many keys together: kBandKeys
// or, if keys move on with the rows, all keys that a block of rows sees and kMoreKeys more.
constexpr int64_t kBandKeys = 4096, kMoreKeys = 256;

inline DType number_of(const at::Tensor& tensor) {
  return static_cast<DType>(tensor.scalar_type());
}

template <class T>
Strided<T> strided(const at::Tensor& tensor) {
  if constexpr (std::is_const_v<T>)
    return {static_cast<T*>(tensor.const_data_ptr()), tensor.stride(0), tensor.stride(1),
            tensor.stride(2)};
  else
    return {static_cast<T*>(tensor.mutable_data_ptr()), tensor.stride(0), tensor.stride(1),
            tensor.stride(2)};
}

// A tensor by sample, head and row, of any dtype.
struct AnyRows {
  char* data;
  int64_t sample, head, row;  // bytes
  DType dtype;

  explicit AnyRows(const at::Tensor& tensor)
      : data(static_cast<char*>(const_cast<void*>(tensor.const_data_ptr()))),
        sample(tensor.stride(0) * tensor.element_size()),
        head(tensor.stride(1) * tensor.element_size()),
        row(tensor.stride(2) * tensor.element_size()),
        dtype(number_of(tensor)) {}
  char* at(int64_t b, int64_t h, int64_t i) const { return data + b * sample + h * head + i * row; }
};

// Calls `run(begin, end)` for parts of the tasks. If there are several threads, `run` is always
// called in a parallel region, where GEMMs use one thread, so that their results do not depend on
// the number of threads.
template <class Task>
void for_tasks(int64_t tasks, const Task& run) {
  const int64_t least = at::get_num_threads() > 1 ? 2 : 1;
  parallel_for(0, std::max(tasks, least), 1, [&](int64_t begin, int64_t end) {
    if (begin < std::min(end, tasks)) run(begin, std::min(end, tasks));
  });
}

// Returns a size for blocks of about equal size, so that no block has a single row unless there is
// only one: the last bit of torch's products of a single row, or a single feature, depends on the
// number of threads.
inline int64_t balanced(int64_t length, int64_t most) {
  const int64_t blocks = std::max<int64_t>((length + most - 1) / most, 1);
  return std::max<int64_t>((length + blocks - 1) / blocks, 1);
}

// The band of a tile: the most keys that a row sees, and whether it is narrow: rows see few keys,
// and not all. In a narrow band smaller blocks of rows waste less work.
struct Band {
  int64_t width;
  bool narrow;
};

template <class A>
Band band_of(const TileTerms<A>& terms, const TileSizes& sizes) {
  const int64_t low = std::max(terms.low, 1 - sizes.rows);
  const int64_t high = std::min(terms.high, sizes.keys - 1);
  const int64_t width = std::max<int64_t>(high - low + 1, 0);
  const bool hides = low > 1 - sizes.rows || high < sizes.keys - 1;
  return {width, hides && width <= 2 * kColumns};
}

// --- forward -----------------------------------------------------------------------------------

template <class Products>
class Forward {
 public:
  using A = typename Products::Number;
  using Weight = typename Products::Weight;

  Forward(const TileSizes& sizes, const TileTerms<A>& terms,
          const typename Products::Shared& shared, int64_t most_rows, const at::Tensor& out,
          const at::Tensor& lse)
      : sizes_(sizes),
        terms_(terms),
        products_(shared, kRows),
        // Blocks of fewer rows have more columns.
        most_columns_(most_rows <= kRows / 2 ? 2 * kColumns : kColumns),
        stride_(most_columns_ + 32),
        block_(terms, most_columns_ + Products::kAlign),
        scores_(kRows * kStride),
        weights_(kInPlace ? 0 : kRows * kStride),
        sums_(kRows * sizes.value_features),
        out_(out),
        lse_(strided<A>(lse)) {}

  void rows(int64_t b, int64_t h, int64_t first, int64_t count) {
    products_.enter_rows(b, h, first, count);
    std::fill_n(states_, count, RowState<A>{-std::numeric_limits<A>::infinity(), 0});
    const Columns seen = terms_.keys_of(first, first + count - 1, sizes_.keys);
    bool adds = false;
    const int64_t begin = seen.begin / Products::kStart * Products::kStart;
    const int64_t step = round_up(balanced(seen.end - begin, most_columns_), kTileElements);
    if (seen.begin < seen.end)
      for (int64_t column = begin; column < seen.end; column += step) {
        add_block(b, h, first, count, column, std::min(step, seen.end - column), adds);
        adds = true;
      }
    finish(b, h, first, count, adds);
  }

 private:
  static constexpr int64_t kStride = kColumns + 32;
  static constexpr bool kInPlace = std::is_same_v<A, Weight>;

  Weight* weights_of(int64_t row) {
    if constexpr (kInPlace)
      return scores_.get() + row * stride_;
    else
      return weights_.get() + row * stride_;
  }

  void add_block(int64_t b, int64_t h, int64_t first, int64_t count, int64_t column, int64_t seen,
                 bool adds) {
    const int64_t columns = round_up(seen, Products::kAlign);
    const int64_t features = sizes_.value_features;
    products_.scores(column, columns, scores_.get(), stride_);
    block_.enter(column, seen, columns);
    for (int64_t i = 0; i < count; ++i) {
      const A factor = weigh_row(scores_.get() + i * stride_, weights_of(i),
                                 block_.row(b, h, first + i), states_[i]);
      if (adds && factor != 1) scale_row(sums_.get() + i * features, factor, features);
    }
    products_.add_values(column, columns, weights_of(0), stride_, adds, sums_.get());
  }

  void finish(int64_t b, int64_t h, int64_t first, int64_t count, bool any) {
    constexpr A kNothing = -std::numeric_limits<A>::infinity();
    if (!any) std::fill_n(sums_.get(), count * sizes_.value_features, A{0});
    for (int64_t i = 0; i < count; ++i) {
      const RowState<A>& state = states_[i];
      A* sums = sums_.get() + i * sizes_.value_features;
      A& lse = *lse_.at(b, h, first + i);
      A factor = 1 / state.sum, share = 0;
      if (state.sum == 0) {  // a row that sees no key: its sums are 0, or NaN from a NaN value
        if (lse != kNothing) continue;
        std::fill_n(sums, sizes_.value_features, A{0});
        factor = 0;
      } else {
        const A part = (state.largest == kNothing ? 0 : state.largest) + std::log(state.sum);
        if (lse == kNothing) {
          lse = part;
        } else {
          const A top = std::max(lse, part);
          const A before = std::exp(lse - top), now = std::exp(part - top);
          share = before / (before + now);
          factor *= now / (before + now);
          lse = top + std::log(before + now);
        }
      }
      store_row(sums, factor, share, out_.at(b, h, first + i), out_.dtype, sizes_.value_features);
    }
  }

  const TileSizes& sizes_;
  const TileTerms<A>& terms_;
  Products products_;
  const int64_t most_columns_, stride_;
  BlockTerms<A> block_;
  Scratch<A> scores_;
  Scratch<Weight> weights_;
  Scratch<A> sums_;
  RowState<A> states_[kRows];
  AnyRows out_;
  Strided<A> lse_;
};

template <class Products, class Inputs>
void attend(const Inputs& inputs, const TileTerms<typename Products::Number>& terms,
            const at::Tensor& out, const at::Tensor& lse) {
  const TileSizes& sizes = inputs.sizes;
  const bool narrow = band_of(terms, sizes).narrow;
  const typename Products::Shared shared(inputs, narrow);
  const int64_t step = balanced(sizes.rows, narrow ? Products::kBandRows : kRows);
  const int64_t blocks = (sizes.rows + step - 1) / step;
  for_tasks(sizes.samples * sizes.heads * blocks, [&](int64_t begin, int64_t end) {
    Forward<Products> forward(sizes, terms, shared, step, out, lse);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task % blocks * step, head = task / blocks;
      forward.rows(head / sizes.heads, head % sizes.heads, first,
                   std::min(step, sizes.rows - first));
    }
  });
}

// --- backward ----------------------------------------------------------------------------------

// Adds the gradients of one key head of one sample; no other task works on the query heads that
// share it.
template <class Products, class T>
class Backward {
 public:
  using A = typename Products::Number;
  using Weight = typename Products::Weight;

  // `lse` is inf in rows that see no key; `inner`: see gradient_row.
  // `grad_bias` (samples, heads, distances) or null.
  Backward(const TileInputs<T>& inputs, const TileTerms<A>& terms, const TileGradients<A>& grads,
           Strided<const A> lse, Strided<const A> inner, A* grad_bias, int64_t b, int64_t g)
      : sizes_(inputs.sizes),
        terms_(terms),
        band_(band_of(terms, sizes_)),
        most_rows_(std::min(band_.narrow ? Products::kBandRows : kRows, sizes_.rows)),
        most_keys_(std::min(most_keys(), sizes_.keys)),
        most_columns_(std::min(most_keys_, 2 * kColumns + kRows) + Products::kAlign),
        stride_(round_up(most_columns_, kTileElements) + 32),
        products_(inputs, grads, b, g, most_rows_, most_keys_),
        block_(terms, most_columns_),
        scores_(most_rows_ * stride_),
        through_(most_rows_ * stride_),
        weights_(kInPlace ? 0 : most_rows_ * stride_),
        back_(kInPlace ? 0 : most_rows_ * stride_),
        bias_row_(grad_bias == nullptr ? 0 : stride_),
        lse_(lse),
        inner_(inner),
        grad_bias_(grad_bias),
        b_(b),
        g_(g) {}

  void run() {
    if constexpr (Products::kRolls)
      if (band_.narrow) return run_band();
    const int64_t heads = sizes_.heads / sizes_.groups;
    for (int64_t key = 0; key < sizes_.keys; key += most_keys_) {
      const int64_t columns = std::min(most_keys_, sizes_.keys - key);
      const Columns seen = terms_.rows_of(key, key + columns - 1, sizes_.rows);
      if (seen.begin >= seen.end) continue;
      const int64_t step = balanced(seen.end - seen.begin, most_rows_);
      products_.enter_keys(key, columns);
      for (int64_t h = g_ * heads; h < (g_ + 1) * heads; ++h)
        for (int64_t row = seen.begin; row < seen.end; row += step)
          add_block(h, row, std::min(step, seen.end - row), key, columns);
      products_.leave_keys();
    }
  }

 private:
  static constexpr bool kInPlace = std::is_same_v<A, Weight>;

  // Under a narrow band a block of rows sees few of the keys held, so it is entered once for all.
  int64_t most_keys() const {
    if (!band_.narrow) return kColumns;
    if (!Products::kRolls) return kBandKeys;
    const int64_t seen = band_.width + most_rows_ + Products::kStart;
    return round_up(seen, Products::kStart) + kMoreKeys;
  }

  // Moves the held keys along with the rows, so that all data in use stays in the cache.
  void run_band() {
    const int64_t heads = sizes_.heads / sizes_.groups;
    const Columns rows = terms_.rows_of(0, sizes_.keys - 1, sizes_.rows);
    const int64_t step = balanced(rows.end - rows.begin, most_rows_);
    for (int64_t row = rows.begin; row < rows.end; row += step) {
      const int64_t count = std::min(step, rows.end - row);
      const Columns seen = terms_.keys_of(row, row + count - 1, sizes_.keys);
      if (seen.begin >= seen.end) continue;
      products_.roll_keys(seen.begin / Products::kStart * Products::kStart, seen.end, most_keys_);
      for (int64_t h = g_ * heads; h < (g_ + 1) * heads; ++h)
        add_block(h, row, count, products_.first_key(), products_.held_keys());
    }
    products_.leave_keys();
  }

  void add_block(int64_t h, int64_t first, int64_t count, int64_t key, int64_t keys) {
    const Columns seen = terms_.keys_of(first, first + count - 1, sizes_.keys);
    const int64_t begin =
        std::max<int64_t>(seen.begin - key, 0) / Products::kStart * Products::kStart;
    const int64_t end = std::min(seen.end - key, keys);
    if (begin >= end) return;
    const int64_t columns = round_up(end - begin, Products::kAlign);
    products_.enter_rows(h, first, count);
    products_.products(begin, columns, scores_.get(), through_.get(), stride_);
    block_.enter(key + begin, end - begin, columns);
    Weight *weights, *back;
    if constexpr (kInPlace) {
      weights = scores_.get(), back = through_.get();
    } else {
      weights = weights_.get(), back = back_.get();
    }
    A* bias_row = grad_bias_ == nullptr ? nullptr : bias_row_.get();
    for (int64_t i = 0; i < count; ++i) {
      const RowTerms<A> terms = block_.row(b_, h, first + i);
      const int64_t at = i * stride_;
      gradient_row(scores_.get() + at, through_.get() + at, weights + at, back + at, bias_row,
                   terms, *lse_.at(b_, h, first + i), *inner_.at(b_, h, first + i));
      if (bias_row != nullptr)
        block_.add_grad_bias(bias_row, terms, first + i,
                             grad_bias_ + (b_ * sizes_.heads + h) * terms_.distances);
    }
    products_.add_gradients(begin, columns, weights, back, stride_);
  }

  const TileSizes& sizes_;
  const TileTerms<A>& terms_;
  const Band band_;
  const int64_t most_rows_, most_keys_, most_columns_, stride_;
  Products products_;
  BlockTerms<A> block_;
  Scratch<A> scores_, through_;
  Scratch<Weight> weights_, back_;
  Scratch<A> bias_row_;
  Strided<const A> lse_, inner_;
  A* grad_bias_;
  int64_t b_, g_;
};

// Fills `inner` of gradient_row: the sums of output times its gradient, less the gradient of lse.
template <class A>
void fill_inner(const at::Tensor& grad_out, const at::Tensor& out,
                const std::optional<at::Tensor>& grad_lse, const at::Tensor& inner) {
  const AnyRows left(grad_out), right(out);
  const Strided<A> to = strided<A>(inner);
  const int64_t heads = inner.size(1), rows = inner.size(2), features = out.size(3);
  const Strided<const A> less = grad_lse ? strided<const A>(*grad_lse) : Strided<const A>{};
  parallel_for(0, inner.size(0) * heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t b = task / heads, h = task % heads;
      for (int64_t i = 0; i < rows; ++i)
        *to.at(b, h, i) =
            product_of_rows<A>(left.at(b, h, i), right.at(b, h, i), right.dtype, features) -
            (grad_lse ? *less.at(b, h, i) : 0);
    }
  });
}

template <class Products, class T>
void attend_backward(const TileInputs<T>& inputs, const TileTerms<typename Products::Number>& terms,
                     const TileGradients<typename Products::Number>& grads, const at::Tensor& lse,
                     const at::Tensor& inner, typename Products::Number* grad_bias) {
  using A = typename Products::Number;
  const TileSizes& sizes = inputs.sizes;
  for_tasks(sizes.samples * sizes.groups, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task)
      Backward<Products, T>(inputs, terms, grads, strided<const A>(lse), strided<const A>(inner),
                            grad_bias, task / sizes.groups, task % sizes.groups)
          .run();
  });
}

}  // namespace symm_cp
