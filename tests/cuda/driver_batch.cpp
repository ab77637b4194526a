// The batched copies of one kind of driver; its other functions are driver.cpp's, which this is
// linked with. BATCH is the number of arguments that tells the kinds apart: 9 from CUDA 12.8 on
// (with the index of the copy that failed), 8 from 13.0 on, 0: none.
#include "cuda/driver.h"

using namespace symm_cp::driver;

extern "C" {

Result simulated_batch(Address* to, Address* from, size_t* sizes, size_t count,
                       CopyAttributes* attributes, size_t* firsts, size_t kinds, Stream stream);

#if BATCH == 9
Result cuMemcpyBatchAsync(Address* to, Address* from, size_t* sizes, size_t count,
                          CopyAttributes* attributes, size_t* firsts, size_t kinds, size_t* failed,
                          Stream stream) {
  if (failed == nullptr) return 1;
  const Result result = simulated_batch(to, from, sizes, count, attributes, firsts, kinds, stream);
  *failed = result == 0 ? *failed : SIZE_MAX;
  return result;
}
#elif BATCH == 8
Result cuMemcpyBatchAsync_v2(Address* to, Address* from, size_t* sizes, size_t count,
                             CopyAttributes* attributes, size_t* firsts, size_t kinds,
                             Stream stream) {
  return simulated_batch(to, from, sizes, count, attributes, firsts, kinds, stream);
}
#endif

}  // extern "C"
