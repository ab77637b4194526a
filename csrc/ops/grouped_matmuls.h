// Matmuls of the experts' rows with their weights. Shared by the ops of grouped_matmuls.cpp and
// their gradients (grouped_gradients.cpp).
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "ops/routing.h"

namespace symm_cp::experts {

using Tensors = std::vector<at::Tensor>;

// Calls body(expert, first row, number of rows) for each of this rank's experts.
template <class Body>
void for_each_expert(const Routing& routing, const Body& body) {
  int64_t begin = 0;
  for (int64_t local = 0; local < routing.local(); ++local) {
    int64_t count = 0;
    for (int64_t r = 0; r < routing.ranks(); ++r)
      count += routing.count(r, routing.rank() * routing.local() + local);
    body(local, begin, count);
    begin += count;
  }
}

// For each of this rank's experts, sets its rows of `to` to its rows @ its weight, or adds the
// product with `add`.
void multiply(const Routing& routing, const at::Tensor& rows, const at::Tensor& weight,
              const at::Tensor& to, bool add);

// Raises ValueError or TypeError for rows that cannot be multiplied.
void check_matrix(const char* op, const std::string& name, const at::Tensor& rows);
// "name[index]"
std::string numbered(const char* name, size_t index);

struct CombineArguments {
  Tensors rows, weights;
  at::Tensor factors, table;
  int64_t top_k, experts;
  at::Tensor addend = {};  // added to the products if defined
};

// Raises ValueError or TypeError unless the products of rows and weights can be added up.
void check_products(const char* op, const CombineArguments& given, int64_t local);
// The products of rows and weights, added up and brought back to their tokens.
at::Tensor matmul_combine(const char* op, Group& group, const CombineArguments& given);

}  // namespace symm_cp::experts
