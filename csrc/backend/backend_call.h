// How a call of the backend is made once its exchanges are known, and how its errors reach torch.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/error.h"
#include "exchange/exchange.h"

namespace symm_cp {

// Asynchronous transfers above this size wake the engine at once, as they would keep the waiting
// thread busy for long. So do transfers in which peers may have more pieces than this rank.
inline constexpr int64_t kWaiterBytes = int64_t{64} << 10;

inline bool wants_engine(const Exchange& exchange) {
  // The peers may exchange more with each other than with this rank, in several pieces.
  if (exchange.kind == ExchangeKind::kAllToAll || exchange.complete) return true;
  int64_t bytes = 0, largest = 0;
  for (const auto* extents : {&exchange.input, &exchange.output}) {
    for (const Extent& extent : *extents) {
      bytes += extent.bytes;
      largest = std::max(largest, extent.bytes);
    }
  }
  const auto parts = static_cast<int64_t>(std::max(exchange.input.size(), exchange.output.size()));
  return bytes > kWaiterBytes || largest * parts > kPieceBytes;
}

// Carries out an exchange of a group of one rank.
void run_alone(const Exchange& exchange);

// Runs `body`; its errors become torch's: ValueError for wrong arguments, DistBackendError (a
// RuntimeError) for failures of the group.
template <class Body>
decltype(auto) translated(Body body) {
  try {
    return body();
  } catch (const c10::Error&) {
    throw;
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  } catch (const std::exception& error) {
    C10_THROW_ERROR(DistBackendError, error.what());
  }
}

// The text that reports an error in the arguments of a call to the peers.
std::string refusal_of(const std::exception& error, int rank);

}  // namespace symm_cp
