// The socket of the host on which a rank runs: memory of other sockets is reached over a slower
// link.
#pragma once

#include <vector>

namespace symm_cp {

// The socket that the CPUs of the calling thread belong to; -1 if they belong to several, if the
// system does not say, or if there are too few ranks for `sockets_of`. SYMM_CP_SOCKETS=n simulates
// n sockets that divide the ranks in order; simulated sockets have the numbers from kAsIf on.
constexpr int kAsIf = 1 << 20;
int own_socket(int rank, int world_size);

// Returns 2 or 4 if that many sockets hold equal numbers of consecutive ranks; 1 otherwise. Each
// socket must hold at least three ranks (two if simulated): with two, ranks would move more bytes
// on their own socket than they save on the link, as symm_cp/schedule/servers.py predicts for four
// servers.
int sockets_of(const std::vector<int>& by_rank);

}  // namespace symm_cp
