-- Holding of requests for an API that has no replica yet, copying of requests to a shadow, and streams of gRPC health
-- checks, which HAProxy's directives can't express. Requests that find a replica and are not copied run nothing of this.

local POLL_MS = 50
local WATCH_MS = 500
local COPIES = 256
local COPIES_BYTES = 64 * 1024 * 1024
-- The buffer does not contain a longer body as a whole.
local COPY_BYTES = 1000000

local holds = Map.new("holds.map", Map._str)

-- Waits until the backend has a server. Sets txn.held to "late" if it has none when the API's timeout is over. Returns
-- at once in an old worker after a reload, whose servers can't change any more; the request then goes to the new worker.
core.register_action("cortex_hold", { "http-req" }, function(txn, timeout_ms)
  local name = txn.f:be_name()
  local arrived = string.match(txn.f:req_hdr("x-cortex-request-id") or "", "^%d+")
  local deadline = (tonumber(arrived) or txn.f:date(0, "ms")) + tonumber(timeout_ms)
  -- HAProxy passes booleans to Lua as numbers.
  while txn.f:nbsrv() == 0 and txn.f:stopping() == 0 and holds:lookup(name) == "1" do
    if txn.f:date(0, "ms") >= deadline then
      txn:set_var("txn.held", "late")
      return
    end
    core.msleep(POLL_MS)
  end
end, 1)

-- Headers that belong to one connection or expect a response before the body. The copy has its own, or none.
local OWN_HEADERS = {
  ["connection"] = true, ["content-length"] = true, ["expect"] = true, ["keep-alive"] = true,
  ["proxy-connection"] = true, ["te"] = true, ["trailer"] = true, ["transfer-encoding"] = true, ["upgrade"] = true,
}

local copies = 0
local copies_bytes = 0

local function send(socket_path, timeout_s, request)
  local socket = core.tcp()
  socket:settimeout(timeout_s)
  if socket:connect("unix@" .. socket_path) and socket:send(request) then
    repeat
      local _, error = socket:receive(16384)
    until error
  end
  socket:close()
end

-- Removed where the gateway checked an API key.
local KEY_HEADERS = { ["authorization"] = true, ["x-api-key"] = true }

-- Tells replicas which requests the other revision of their API gets, too.
local COMPARED = "x-cortex-compared"

local function request_text(txn, body, is_canary)
  local lines = { txn.f:method() .. " " .. txn.f:pathq() .. " HTTP/1.1" }
  local has_shown_key = txn:get_var("txn.key") ~= nil
  for name, values in pairs(txn.http:req_get_headers()) do
    local is_ours = OWN_HEADERS[name] or string.sub(name, 1, 9) == "x-cortex-" or has_shown_key and KEY_HEADERS[name]
    if not is_ours then
      for index = 0, #values do
        lines[#lines + 1] = name .. ": " .. values[index]
      end
    end
  end
  lines[#lines + 1] = "connection: close"
  lines[#lines + 1] = "content-length: " .. #body
  lines[#lines + 1] = "x-cortex-backend: " .. txn:get_var("txn.copy")
  lines[#lines + 1] = "x-cortex-request-id: " .. txn.f:unique_id()
  lines[#lines + 1] = "x-cortex-shadow: 1"
  if is_canary then
    lines[#lines + 1] = COMPARED .. ": copy"
  end
  local prefix = txn:get_var("txn.prefix")
  if prefix then
    lines[#lines + 1] = "x-cortex-endpoint: " .. string.match(prefix, "^[^|]*|(.*)$")
    local split = txn:get_var("txn.split")
    if split then
      lines[#lines + 1] = "x-cortex-splitter: " .. split
    end
  end
  return table.concat(lines, "\r\n") .. "\r\n\r\n" .. body
end

-- Sends a copy of the request to the shadow in the background, unless too many copies are in progress.
core.register_action("cortex_copy", { "http-req" }, function(txn, socket_path, timeout_s)
  local body = txn.f:req_body() or ""
  if copies >= COPIES or copies_bytes + #body > COPIES_BYTES or #body > COPY_BYTES then
    return
  end
  if txn.f:req_body_size() > #body then
    return
  end
  local is_canary = string.sub(txn:get_var("txn.copy"), -7) == ".canary"
  local request = request_text(txn, body, is_canary)
  if is_canary then
    txn.http:req_set_header(COMPARED, "original")
  end
  local size = #request
  copies = copies + 1
  copies_bytes = copies_bytes + size
  core.register_task(function()
    pcall(send, socket_path, tonumber(timeout_s), request)
    copies = copies - 1
    copies_bytes = copies_bytes - size
  end)
end, 2)

local services = Map.new("grpc.map", Map._str)

-- Statuses of grpc.health.v1.
local SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3

-- The service that a HealthCheckRequest names, its field 1, behind the prefix of its frame; "" without one.
local function watched_service(body)
  return string.match(body, "^.....\n[\128-\255]*[\0-\127](.*)$") or ""
end

local function health(fetches, service, all)
  if service ~= "" then
    local backend = services:lookup(service)
    if not backend then
      return SERVICE_UNKNOWN
    end
    return fetches:nbsrv(backend) > 0 and SERVING or NOT_SERVING
  end
  for name in string.gmatch(all, "%S+") do
    if fetches:nbsrv(services:lookup(name)) > 0 then
      return SERVING
    end
  end
  return NOT_SERVING
end

-- Answers grpc.health.v1.Health/Watch: sends the status of a service, and every later one. It is answered here because
-- the gateway knows all replicas, and because a stream without an end would occupy a replica. It ends with the worker.
core.register_service("cortex_watch", "http", function(applet)
  local service = watched_service(applet:receive(1024) or "")
  local all = applet.headers["x-cortex-services"][0]
  applet:set_status(200)
  applet:add_header("content-type", "application/grpc")
  applet:start_response()
  local sent
  while applet.f:stopping() == 0 do
    local status = health(applet.f, service, all)
    if status ~= sent then
      applet:send("\0\0\0\0\2\8" .. string.char(status))
      sent = status
    end
    core.msleep(WATCH_MS)
  end
end)
