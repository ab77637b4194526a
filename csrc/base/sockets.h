// On which socket of the host a rank runs: memory of another socket is reached over a slower link.
#pragma once

#include <vector>

namespace symm_cp {

// The socket that the CPUs of the calling thread belong to; -1 where they belong to several, where
// nobody knows, or where there are too few ranks for `sockets_of` to ask. SYMM_CP_SOCKETS=n: as if
// the ranks were divided among n sockets, in order; such numbers are kAsIf and more.
constexpr int kAsIf = 1 << 20;
int own_socket(int rank, int world_size);

// The number of sockets, 2 or 4, where each has as many ranks, which follow one another; 1
// otherwise. Each must have three (two as if): with two, ranks would move more bytes on their own
// socket than they save on the link (symm_cp/schedule/servers.py predicts so for four servers).
int sockets_of(const std::vector<int>& by_rank);

}  // namespace symm_cp
