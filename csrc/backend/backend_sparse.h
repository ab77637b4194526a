// All-reduces of sparse tensors, such as gradients of embeddings.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "backend/backend_work.h"

namespace symm_cp {

// Whether a tensor has coordinates and values. Other layouts (CSR and its kin) are not supported.
bool is_sparse(const at::Tensor& tensor);

// Adds to a collective the exchanges that replace a tensor by the sum of all ranks' tensors,
// coalesced. Ranks may have different numbers of values: the first exchange gathers the numbers,
// the second all coordinates and values, and each rank adds them in the order of the ranks. Throws
// NotImplementedError for operations other than SUM.
void add_sparse_sum(Collective& collective, const char* op, const at::Tensor& tensor,
                    const c10d::ReduceOp& reduce_op, int world_size);

}  // namespace symm_cp
