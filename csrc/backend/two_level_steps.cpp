// The steps of each collective over two levels: first within each host, then between hosts, last
// within each host.
#include <algorithm>

#include "backend/backend_call.h"
#include "backend/two_level.h"
#include "exchange/reduce.h"

namespace symm_cp {

namespace {

using c10d::OpType;
using std::chrono::milliseconds;

// With three hosts or more, a column splits the sum of a part larger than this: each of its ranks
// sums a piece.
constexpr int64_t kSplitBytes = int64_t{64} << 10;

// Kinds of collectives; several of torch's types map to one kind.
enum class Action {
  kAllReduce,
  kReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kGather,
  kScatter,
  kAllToAll
};

Action action_of(OpType type) {
  if (type == kCoalescedScatter) return Action::kReduceScatter;
  switch (type) {
    case OpType::ALLREDUCE:
    case OpType::ALLREDUCE_COALESCED: return Action::kAllReduce;
    case OpType::REDUCE: return Action::kReduce;
    case OpType::REDUCE_SCATTER:
    case OpType::_REDUCE_SCATTER_BASE: return Action::kReduceScatter;
    case OpType::BROADCAST: return Action::kBroadcast;
    case OpType::GATHER: return Action::kGather;
    case OpType::SCATTER: return Action::kScatter;
    case OpType::ALLTOALL:
    case OpType::ALLTOALL_BASE: return Action::kAllToAll;
    default: return Action::kAllGather;  // barriers, too
  }
}

Exchange like(const Exchange& exchange, ExchangeKind kind) {
  // Averages of hosts' averages would be rounded twice.
  TORCH_CHECK_NOT_IMPLEMENTED(
      exchange.reduce_op != ReduceOp::kAvg || exchange.dtype > DType::kInt64, exchange.call_name,
      ": avg of integers is not supported across hosts; use sum");
  Exchange made{};
  made.kind = kind;
  made.call_name = exchange.call_name;
  made.dtype = exchange.dtype;
  made.reduce_op = exchange.reduce_op;
  return made;
}

// Joins adjacent parts into one.
Extent joined(const std::vector<Extent>& parts) {
  Extent all = parts.front();
  for (size_t i = 1; i < parts.size(); ++i) all.bytes += parts[i].bytes;
  return all;
}

Extent scratch_of(Stages& stages, int64_t bytes) {
  stages.scratch.push_back(at::empty({bytes}, at::kByte));
  return {stages.scratch.back().data_ptr(), bytes};
}

// `out` may be one of the sources.
void reduce_into(const Exchange& exchange, const Extent& out, const std::vector<Extent>& sources) {
  std::vector<const void*> data;
  for (const Extent& source : sources) data.push_back(source.data);
  reduce(out.data, data.data(), static_cast<int>(data.size()),
         out.bytes / element_bytes(exchange.dtype), exchange.dtype, exchange.reduce_op, false);
}

}  // namespace

std::vector<int> TwoLevelBackend::column() const {
  std::vector<int> ranks;
  for (int host = 0; host < hosts(); ++host)
    if (host != spread_.host) ranks.push_back(spread_.ranks[host][spread_.place]);
  return ranks;
}

std::vector<int> TwoLevelBackend::ranks_on_other_hosts() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < size_; ++rank)
    if (seat(rank).first != spread_.host) ranks.push_back(rank);
  return ranks;
}

std::pair<int, int> TwoLevelBackend::seat(int rank) const {
  for (int host = 0; host < hosts(); ++host)
    for (int place = 0; place < places(); ++place)
      if (spread_.ranks[host][place] == rank) return {host, place};
  throw std::out_of_range("rank " + std::to_string(rank));
}

// Replaces each host's sum of a part, `mine`, by the sum over all hosts: each rank of the column
// sums a part of it.
std::function<void()> TwoLevelBackend::split_sum(Stages& stages, const Exchange& exchange,
                                                 Extent mine, milliseconds timeout) {
  const std::vector<Extent> parts = aligned_parts_of(mine, hosts());
  const Extent own = parts[spread_.host];
  std::vector<Extent> sources(static_cast<size_t>(hosts()), own);
  std::vector<Parcel> results_out, results_in;
  for (int host = 0; host < hosts(); ++host) {
    if (host == spread_.host) continue;
    const int peer = spread_.ranks[host][spread_.place];
    sources[host] = scratch_of(stages, own.bytes);
    stages.sends.push_back({peer, parts[host]});
    stages.receives.push_back({peer, sources[host]});
    results_out.push_back({peer, own});
    results_in.push_back({peer, parts[host]});
  }
  return [=, this] {
    reduce_into(exchange, own, sources);
    links_.exchange(exchange.call_name, "", results_out, results_in, timeout);
  };
}

void TwoLevelBackend::all_reduce(Stages& stages, const Exchange& exchange, milliseconds timeout) {
  const Extent out = joined(exchange.output);
  const std::vector<Extent> parts = aligned_parts_of(out, places());
  const Extent mine = parts[spread_.place];

  Exchange first = like(exchange, ExchangeKind::kReduceScatter);
  first.input = aligned_parts_of(joined(exchange.input), places());
  first.output = {mine};
  stages.first.push_back(std::move(first));

  if (hosts() > 2 && out.bytes > places() * kSplitBytes) {
    stages.then = split_sum(stages, exchange, mine, timeout);
  } else {
    std::vector<Extent> sources(static_cast<size_t>(hosts()), mine);
    for (int host = 0; host < hosts(); ++host) {
      if (host == spread_.host) continue;
      sources[host] = scratch_of(stages, mine.bytes);
      stages.sends.push_back({spread_.ranks[host][spread_.place], mine});
      stages.receives.push_back({spread_.ranks[host][spread_.place], sources[host]});
    }
    stages.then = [=] { reduce_into(exchange, mine, sources); };
  }

  Exchange last = like(exchange, ExchangeKind::kAllGather);
  last.input = {mine};
  last.output = parts;
  stages.last.push_back(std::move(last));
}

void TwoLevelBackend::reduce_to(Stages& stages, const Exchange& exchange, int root) {
  const Extent in = joined(exchange.input);
  const bool takes = rank_ == root;
  const Extent out = takes ? joined(exchange.output) : scratch_of(stages, in.bytes);
  const std::vector<Extent> parts = aligned_parts_of(out, places());
  const Extent mine = parts[spread_.place];

  Exchange first = like(exchange, ExchangeKind::kReduceScatter);
  first.input = aligned_parts_of(in, places());
  first.output = {mine};
  stages.first.push_back(std::move(first));

  const int home = seat(root).first;
  if (home != spread_.host) {
    stages.sends.push_back({spread_.ranks[home][spread_.place], mine});
    return;
  }
  std::vector<Extent> sources(static_cast<size_t>(hosts()), mine);
  for (int host = 0; host < hosts(); ++host) {
    if (host == home) continue;
    sources[host] = scratch_of(stages, mine.bytes);
    stages.receives.push_back({spread_.ranks[host][spread_.place], sources[host]});
  }
  stages.then = [=] { reduce_into(exchange, mine, sources); };
  Exchange last = like(exchange, ExchangeKind::kAllGather);
  last.input = {mine};
  last.output = takes ? parts : std::vector<Extent>(parts.size());
  stages.last.push_back(std::move(last));
}

void TwoLevelBackend::reduce_scatter(Stages& stages, const Exchange& exchange) {
  const Extent out = exchange.output.front();
  std::vector<Extent> sources;
  for (int host = 0; host < hosts(); ++host) {
    const int peer = spread_.ranks[host][spread_.place];
    const bool own = host == spread_.host;
    Exchange first = like(exchange, ExchangeKind::kReduceScatter);
    for (const int rank : spread_.ranks[host]) first.input.push_back(exchange.input[rank]);
    const Extent sum = scratch_of(stages, exchange.input[peer].bytes);
    first.output = {sum};
    stages.first.push_back(std::move(first));
    sources.push_back(own ? sum : scratch_of(stages, out.bytes));
    if (own) continue;
    stages.sends.push_back({peer, sum});
    stages.receives.push_back({peer, sources.back()});
  }
  stages.then = [=] { reduce_into(exchange, out, sources); };
}

void TwoLevelBackend::all_gather(Stages& stages, const Exchange& exchange) {
  const Extent in = exchange.input.front();
  for (int host = 0; host < hosts(); ++host) {
    const int peer = spread_.ranks[host][spread_.place];
    const bool own = host == spread_.host;
    Exchange last = like(exchange, ExchangeKind::kAllGather);
    last.input = {own ? in : exchange.output[peer]};
    for (const int rank : spread_.ranks[host]) last.output.push_back(exchange.output[rank]);
    stages.last.push_back(std::move(last));
    if (own) continue;
    stages.sends.push_back({peer, in});
    stages.receives.push_back({peer, exchange.output[peer]});
  }
}

void TwoLevelBackend::broadcast(Stages& stages, const Exchange& exchange, int root) {
  const auto [home, place] = seat(root);
  const Extent data = rank_ == root ? exchange.input.front() : exchange.output[root];
  const bool gives = place == spread_.place;
  if (rank_ == root)
    for (const int peer : column()) stages.sends.push_back({peer, data});
  else if (gives)
    stages.receives.push_back({root, data});
  Exchange last = like(exchange, ExchangeKind::kAllGather);
  last.input.resize(1);
  last.output.resize(static_cast<size_t>(places()));
  (gives ? last.input.front() : last.output[place]) = data;
  stages.last.push_back(std::move(last));
}

void TwoLevelBackend::gather(Stages& stages, const Exchange& exchange, int root) {
  const Extent in = exchange.input.front();
  if (seat(root).first != spread_.host) {
    stages.sends.push_back({root, in});
    return;
  }
  Exchange first = like(exchange, ExchangeKind::kAllGather);
  first.input = {in};
  for (const int rank : here()) first.output.push_back(exchange.output[rank]);
  stages.first.push_back(std::move(first));
  if (rank_ == root)
    for (const int peer : ranks_on_other_hosts())
      stages.receives.push_back({peer, exchange.output[peer]});
}

void TwoLevelBackend::scatter(Stages& stages, const Exchange& exchange, int root) {
  const auto [home, place] = seat(root);
  const Extent out = exchange.output[root];
  if (home != spread_.host) {
    stages.receives.push_back({root, out});
    return;
  }
  Exchange first = like(exchange, ExchangeKind::kAllToAll);
  for (const int rank : here()) first.input.push_back(exchange.input[rank]);
  first.output.resize(static_cast<size_t>(places()));
  first.output[place] = out;
  stages.first.push_back(std::move(first));
  if (rank_ == root)
    for (const int peer : ranks_on_other_hosts())
      stages.sends.push_back({peer, exchange.input[peer]});
}

void TwoLevelBackend::all_to_all(Stages& stages, const Exchange& exchange) {
  Exchange first = like(exchange, ExchangeKind::kAllToAll);
  for (const int rank : here()) {
    first.input.push_back(exchange.input[rank]);
    first.output.push_back(exchange.output[rank]);
  }
  stages.first.push_back(std::move(first));
  for (const int peer : ranks_on_other_hosts()) {
    stages.sends.push_back({peer, exchange.input[peer]});
    stages.receives.push_back({peer, exchange.output[peer]});
  }
}

Stages TwoLevelBackend::stages(const Routing& routing, const Exchange& exchange,
                               milliseconds timeout) {
  Stages made;
  made.call_name = exchange.call_name;
  switch (action_of(routing.type)) {
    case Action::kAllReduce: all_reduce(made, exchange, timeout); break;
    case Action::kReduce: reduce_to(made, exchange, routing.root); break;
    case Action::kReduceScatter: reduce_scatter(made, exchange); break;
    case Action::kAllGather: all_gather(made, exchange); break;
    case Action::kBroadcast: broadcast(made, exchange, routing.root); break;
    case Action::kGather: gather(made, exchange, routing.root); break;
    case Action::kScatter: scatter(made, exchange, routing.root); break;
    case Action::kAllToAll: all_to_all(made, exchange); break;
  }
  return made;
}

// Returns steps in which the same ranks meet as in the refused exchange, and receive the reason.
Stages TwoLevelBackend::refused(const Routing& routing, const std::string& call_name) const {
  Stages made;
  made.call_name = call_name;
  const Action action = action_of(routing.type);
  const bool rooted = routing.root >= 0 && routing.root < size_;
  if (action == Action::kBroadcast) made.last.resize(1);
  if (routing.root >= 0 && !rooted) return made;  // the ranks that others meet are unknown
  const auto [home, place] = rooted ? seat(routing.root) : std::pair{-1, -1};
  const bool is_home = home == spread_.host;
  const bool is_root = routing.root == rank_;
  const auto meet = [](const std::vector<int>& ranks, std::vector<Parcel>& parcels) {
    for (const int peer : ranks) parcels.push_back({peer, {}});
  };
  const std::vector<int> root_alone{routing.root};
  switch (action) {
    case Action::kAllReduce:
    case Action::kReduceScatter:
    case Action::kAllGather:
      made.first.resize(action == Action::kReduceScatter ? hosts() : action == Action::kAllReduce);
      made.last.resize(action == Action::kAllGather ? hosts() : action == Action::kAllReduce);
      meet(column(), made.sends);
      meet(column(), made.receives);
      break;
    case Action::kAllToAll:
      made.first.resize(1);
      meet(ranks_on_other_hosts(), made.sends);
      meet(ranks_on_other_hosts(), made.receives);
      break;
    case Action::kReduce:
      made.first.resize(1);
      made.last.resize(is_home);
      if (is_home)
        meet(column(), made.receives);
      else
        meet({spread_.ranks[home][spread_.place]}, made.sends);
      break;
    case Action::kBroadcast:
      if (is_root)
        meet(column(), made.sends);
      else if (place == spread_.place)
        meet(root_alone, made.receives);
      break;
    case Action::kGather:
    case Action::kScatter: {
      const bool gather = action == Action::kGather;
      made.first.resize(is_home);
      if (is_root)
        meet(ranks_on_other_hosts(), gather ? made.receives : made.sends);
      else if (!is_home)
        meet(root_alone, gather ? made.sends : made.receives);
      break;
    }
  }
  return made;
}

}  // namespace symm_cp
