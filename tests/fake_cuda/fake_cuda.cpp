// A CUDA device in host memory: every operator runs the CPU's kernel on an alias of the device's tensors.
#include <ATen/ATen.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <chrono>
#include <cstring>
#include <mutex>

using c10::DeviceType;
using c10::Device;
using c10::Stream;
namespace {

thread_local c10::DeviceIndex current = 0;
c10::DeviceIndex count() {
  static c10::DeviceIndex n = [] { const char* s = std::getenv("FAKE_CUDA_DEVICES"); return (c10::DeviceIndex)(s ? std::atoi(s) : 1); }();
  return n;
}
// Copies that do not block happen later: to the host when something is waited for, to the device before its next operator.
std::mutex lock;
std::vector<std::pair<at::Tensor, at::Tensor>> to_host, from_host;  // (target, source), both in host memory
void finish(std::vector<std::pair<at::Tensor, at::Tensor>>& copies) {
  std::vector<std::pair<at::Tensor, at::Tensor>> due;
  { std::lock_guard<std::mutex> g(lock); due.swap(copies); }
  at::AutoDispatchBelowADInplaceOrView below;
  for (auto& [target, source] : due) target.copy_(source);
}
void wait_for_device() { finish(from_host); finish(to_host); }
double now() { return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device d) const override { Device old(DeviceType::CUDA, current); setDevice(d); return old; }
  Device getDevice() const override { return Device(DeviceType::CUDA, current); }
  void setDevice(Device d) const override { TORCH_CHECK(d.index() < count(), "no such fake device"); if (d.index() >= 0) current = d.index(); }
  void uncheckedSetDevice(Device d) const noexcept override { if (d.index() >= 0) current = d.index(); }
  Stream getStream(Device d) const noexcept override { return Stream(Stream::DEFAULT, Device(DeviceType::CUDA, d.index() < 0 ? current : d.index())); }
  Stream getDefaultStream(Device d) const override { return getStream(d); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getStream(d); }
  Stream getNewStream(Device d, int) const override { return getStream(d); }
  Stream exchangeStream(Stream s) const noexcept override { return getStream(s.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return count(); }
  void destroyEvent(void* e, const c10::DeviceIndex) const noexcept override { delete static_cast<double*>(e); }
  void record(void** e, const Stream&, const c10::DeviceIndex, const c10::EventFlag) const override { if (!*e) *e = new double; *static_cast<double*>(*e) = now(); }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override { wait_for_device(); }
  void synchronizeEvent(void*) const override { wait_for_device(); }
  void synchronizeDevice(const c10::DeviceIndex) const override { wait_for_device(); }
  double elapsedTime(void* a, void* b, const c10::DeviceIndex) const override { return *static_cast<double*>(b) - *static_cast<double*>(a); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void* p = c10::GetCPUAllocator()->raw_allocate(n ? n : 1);
    return {p, p, &free_, Device(DeviceType::CUDA, current)};
  }
  static void free_(void* p) { c10::GetCPUAllocator()->raw_deallocate(p); }
  c10::DeleterFnPtr raw_deleter() const override { return &free_; }
  void copy_data(void* d, const void* s, std::size_t n) const override { std::memcpy(d, s, n); }
};
DeviceAllocator allocator;

}  // namespace

namespace at {
struct CUDAHooks : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return count() > 0; }
  bool hasCUDA() const override { return count() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return count(); }
  void setCurrentDevice(DeviceIndex d) const override { current = d; }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { auto old = current; current = d; return old; }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  bool isPinnedPtr(const void*) const override { return false; }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  Device getDeviceFromPtr(void*) const override { return Device(DeviceType::CUDA, current); }
  int getNumGPUs() const override { return count(); }
  void deviceSynchronize(DeviceIndex) const override {}
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

namespace {
using at::Tensor;

// A CPU tensor on the same memory; it keeps the device tensor's storage alive.
Tensor host_alias(const Tensor& t) {
  if (!t.defined() || !t.is_cuda()) return t;
  auto s = t.storage();
  c10::Storage host(c10::Storage::use_byte_size_t(), s.nbytes(),
                    c10::DataPtr(s.mutable_data(), new c10::Storage(s), [](void* p) { delete static_cast<c10::Storage*>(p); }, Device(DeviceType::CPU)),
                    c10::GetCPUAllocator(), true);
  auto r = at::detail::make_tensor<c10::TensorImpl>(std::move(host), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  r.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.is_conj()) r._set_conj(true);
  if (t.is_neg()) r._set_neg(true);
  return r;
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard g(device.value_or(Device(DeviceType::CUDA, current)));
  auto sz = C10_AS_INTARRAYREF_SLOW(size), st = C10_AS_INTARRAYREF_SLOW(stride);
  return at::detail::empty_strided_generic(sz, st, &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype.value_or(at::kFloat));
}
Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard g(device.value_or(Device(DeviceType::CUDA, current)));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype.value_or(at::kFloat), format);
}
Tensor to_device(const Tensor& host, Device device) {
  c10::DeviceGuard g(device);
  Tensor r = at::detail::empty_strided_generic(host.sizes(), host.strides(), &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA), host.scalar_type());
  // Strided results may have gaps: the whole extent is copied.
  size_t bytes = r.storage().nbytes();
  std::memcpy(r.storage().mutable_data(), host.data_ptr(), std::min(bytes, host.storage().nbytes() - host.storage_offset() * host.itemsize()));
  if (host.is_conj()) r._set_conj(true);
  if (host.is_neg()) r._set_neg(true);
  return r;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  finish(from_host);
  const auto& schema = op.schema();
  const auto n = schema.arguments().size();
  const auto begin = stack->size() - n;
  std::vector<c10::IValue> given(stack->end() - n, stack->end());
  std::optional<Device> device;
  auto look = [&](const Tensor& t) { if (t.defined() && t.is_cuda() && !device) device = t.device(); };
  auto refuse = [&](const Tensor& t) {
    if (device && t.defined() && !t.is_cuda() && t.dim() > 0 && t.numel() > 0)
      TORCH_CHECK(false, "Expected all tensors to be on the same device: ", schema.name(), " got a tensor on ", t.device(), " of shape ", t.sizes());
  };
  auto each = [&](auto f) {
    for (auto& v : given) {
      if (v.isTensor()) f(v.toTensor());
      else if (v.isTensorList()) for (const Tensor& t : v.toTensorList()) f(t);
      else if (v.isOptionalTensorList()) for (const std::optional<Tensor>& t : v.toOptionalTensorList()) if (t) f(*t);
    }
  };
  each(look);
  // The indices of indexing may be on the CPU, as with CUDA.
  if (schema.name().find("aten::index") != 0 && schema.name().find("aten::_index_put") != 0) each(refuse);
  std::vector<std::pair<Tensor, Tensor>> aliases;  // device, host
  auto host = [&](const Tensor& t) { if (!t.defined() || !t.is_cuda()) return t; Tensor a = host_alias(t); aliases.emplace_back(t, a); return a; };
  for (size_t i = 0; i < n; i++) {
    auto& v = (*stack)[begin + i];
    if (v.isTensor()) v = host(v.toTensor());
    else if (v.isTensorList()) { c10::List<Tensor> l; for (const Tensor& t : v.toTensorList()) l.push_back(host(t)); v = l; }
    else if (v.isOptionalTensorList()) { c10::List<std::optional<Tensor>> l; for (const std::optional<Tensor>& t : v.toOptionalTensorList()) l.push_back(t ? std::optional<Tensor>(host(*t)) : t); v = l; }
    else if (v.isDevice()) { if (v.toDevice().is_cuda()) { device = v.toDevice(); v = Device(DeviceType::CPU); } }
  }
  TORCH_CHECK(device.has_value(), "no device for ", schema.name());
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  // An output that was resized: its memory is another one now.
  for (auto& [dev, h] : aliases) {
    if (h.sizes() != dev.sizes() || h.data_ptr() != dev.data_ptr()) {
      dev.unsafeGetTensorImpl()->set_storage_keep_dtype(to_device(h.contiguous(), dev.device()).storage());
      dev.unsafeGetTensorImpl()->set_sizes_contiguous(h.sizes());
    }
  }
  auto back = [&](const Tensor& t) -> Tensor {
    if (!t.defined()) return t;
    for (auto& [dev, h] : aliases) if (h.unsafeGetTensorImpl() == t.unsafeGetTensorImpl()) return dev;
    for (auto& [dev, h] : aliases) if (h.storage().data() == t.storage().data() && t.storage().data() && h.numel()) {
      // A view of an argument.
      auto r = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(dev.storage()), c10::DispatchKeySet(c10::DispatchKey::CUDA), t.dtype());
      r.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
      return r;
    }
    return to_device(t, *device);
  };
  const auto m = schema.returns().size();
  const auto first = stack->size() - m;
  for (size_t i = 0; i < m; i++) {
    auto& v = (*stack)[first + i];
    if (v.isTensor()) v = back(v.toTensor());
    else if (v.isTensorList()) { c10::List<Tensor> l; for (const Tensor& t : v.toTensorList()) l.push_back(back(t)); v = l; }
  }
}

Tensor& copy_(Tensor& self, const Tensor& src, bool non_blocking) {
  Tensor a = host_alias(self), b = host_alias(src);
  if (non_blocking && !self.is_cuda()) {
    finish(from_host);  // copies on one stream are done in order: what is read here are the values that earlier ones brought
    a.view({-1}).view(at::kByte).fill_(0x7f);  // nobody may read this before the copy is done
    std::lock_guard<std::mutex> g(lock);
    to_host.emplace_back(a, b.clone());
  } else if (non_blocking && !src.is_cuda()) {
    std::lock_guard<std::mutex> g(lock);
    from_host.emplace_back(a, b);
  } else {
    finish(from_host);
    a.copy_(b);
  }
  return self;
}
Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) { host_alias(dst).copy_(host_alias(self)); return dst; }
at::Scalar item(const Tensor& t) { wait_for_device(); return host_alias(t).item(); }
const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sz = C10_AS_INTARRAYREF_SLOW(size);
  size_t need = c10::multiply_integers(sz) * self.itemsize() + self.storage_offset() * self.itemsize();
  if (need > self.storage().nbytes()) {
    auto p = allocator.allocate(need);
    std::memcpy(p.get(), self.storage().data(), self.storage().nbytes());
    self.storage().set_data_ptr_noswap(std::move(p));
    self.storage().set_nbytes(need);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sz);
  return self;
}
Tensor& set_storage(Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return self;
}
Tensor& set_whole(Tensor& self, at::Storage source) {
  int64_t n = source.nbytes() / self.itemsize();
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source);
  self.unsafeGetTensorImpl()->set_sizes_contiguous({n});
  return self;
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source.storage());
  self.unsafeGetTensorImpl()->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return self;
}
Tensor& set_empty(Tensor& self) {
  c10::DeviceGuard g(self.device());
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(c10::Storage(c10::Storage::use_byte_size_t(), 0, allocator.allocate(0), &allocator, true));
  self.unsafeGetTensorImpl()->set_sizes_contiguous({0});
  return self;
}
bool is_pinned(const Tensor& t, std::optional<Device>) { return false; }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("copy_", TORCH_FN(copy_));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_local_scalar_dense", TORCH_FN(item));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_.source_Storage", TORCH_FN(set_whole));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("set_", TORCH_FN(set_empty));
}
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
}  // namespace

extern "C" int fake_cuda_count() { return count(); }
