#include "cuda/driver.h"

#include <dlfcn.h>

#include <map>
#include <mutex>

namespace symm_cp::driver {

namespace {

template <class F>
void find(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(library, name));
}

// Finds a function that only a library substituted for the driver has.
template <class F>
void find_hosted(void* library, const char* name, F& function) {
  find(library, name, function);
}

template <class F>
void require(void* library, const std::string& path, const char* name, F& function) {
  find(library, name, function);
  if (function == nullptr) {
    const bool cuda = path.find("libcuda.so") != std::string::npos;
    throw Error(path + " has no " + name +
                (cuda ? ": the driver is too old, CUDA 11.7 or later is needed" : ""));
  }
}

Api open(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    throw Error("the driver library " + path + " does not load: " + (reason ? reason : ""));
  }
  Api api{};
  require(library, path, "cuDriverGetVersion", api.get_version);
  require(library, path, "cuGetErrorName", api.error_name);
  require(library, path, "cuEventCreate", api.event_create);
  require(library, path, "cuEventDestroy_v2", api.event_destroy);
  require(library, path, "cuEventRecord", api.event_record);
  require(library, path, "cuEventQuery", api.event_query);
  require(library, path, "cuStreamWaitEvent", api.stream_wait_event);
  require(library, path, "cuStreamBatchMemOp_v2", api.mem_ops);
  require(library, path, "cuMemcpyAsync", api.copy);
  require(library, path, "cuMemcpy2DAsync_v2", api.copy_2d);
  require(library, path, "cuMemcpyDtoHAsync_v2", api.copy_to_host);
  require(library, path, "cuMemAllocHost_v2", api.host_alloc);
  require(library, path, "cuMemFreeHost", api.host_free);
  require(library, path, "cuStreamCreate", api.stream_create);
  require(library, path, "cuStreamQuery", api.stream_query);
  require(library, path, "cuCtxGetCurrent", api.context_get);
  require(library, path, "cuCtxSetCurrent", api.context_set);
  require(library, path, "cuThreadExchangeStreamCaptureMode", api.capture_mode);
  find(library, "cuStreamGetCaptureInfo_v2", api.capture_info);
  find(library, "cuMemcpyBatchAsync_v2", api.copy_batch);
  if (api.copy_batch == nullptr) find(library, "cuMemcpyBatchAsync", api.copy_batch_12);
  find_hosted(library, "symm_cp_hosted_stream", api.hosted_stream);
  find_hosted(library, "symm_cp_hosted_use", api.hosted_use);
  find_hosted(library, "symm_cp_hosted_ops", api.hosted_ops);
  return api;
}

}  // namespace

int Api::version() const {
  int found = 0;
  expect(get_version(&found), "cuDriverGetVersion");
  return found;
}

void Api::expect(Result result, const char* what) const {
  if (result == 0) return;
  const char* name = nullptr;
  error_name(result, &name);
  throw Error(std::string(what) + " failed: " + (name ? name : "error " + std::to_string(result)));
}

const Api& load(const std::string& path) {
  static std::mutex mutex;
  static std::map<std::string, Api> known;
  std::lock_guard<std::mutex> lock(mutex);
  auto found = known.find(path);
  if (found == known.end()) found = known.emplace(path, open(path)).first;
  return found->second;
}

}  // namespace symm_cp::driver
