// On which socket of the host a rank runs: memory of another socket is reached over a slower link.
#pragma once

#include <vector>

namespace symm_cp {

// The socket that the CPUs of the calling thread belong to; -1 where they belong to several, or
// nobody knows. SYMM_CP_SOCKETS=n: as if the ranks were divided among n sockets, in order.
int own_socket(int rank, int world_size);

// The number of sockets, 2 or 4, where each has as many ranks, at least two, that follow one
// another; 1 otherwise.
int sockets_of(const std::vector<int>& by_rank);

}  // namespace symm_cp
