-- Holding of requests for an API that has no replica yet, readiness, refusal of requests, copying of requests to a shadow,
-- and streams of gRPC health checks, which HAProxy's directives can't express. Requests that find a replica and are not
-- copied run nothing of this.

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

local ready = Map.new("ready.map", Map._str)

-- Returns whether everything has a server that `needs` names, a value of the map.
local function has_servers(fetches, needs)
  for backend in string.gmatch(needs, "%S+") do
    if backend ~= "+" and (backend == "-" or fetches:nbsrv(backend) == 0) then
      return false
    end
  end
  return true
end

local function answer_ready(txn, status, fields)
  local reply = txn:reply({ status = status })
  reply:add_header("content-type", "application/json")
  if status == 503 then
    reply:add_header("retry-after", "1")
  end
  reply:set_body("{" .. fields .. "}")
  txn:done(reply)
end

-- Returns the APIs that a query `?api=A&api=B` names; those of the gateway if it names none.
local function asked_apis(txn)
  local names = {}
  for name in string.gmatch("&" .. (txn.f:query() or ""), "&api=([^&]*)") do
    names[#names + 1] = txn.c:url_dec(name, 1) or name  -- one with a malformed escape stays as it is
  end
  if #names == 0 then
    for name in string.gmatch(ready:lookup("*") or "", "%S+") do
      names[#names + 1] = name
    end
  end
  return names
end

-- Answers whether an API can answer requests, at a path below its endpoint, or all that the query names.
core.register_action("cortex_ready", { "http-req" }, function(txn)
  local drains = txn.f:nbsrv("cortex-draining") > 0
  local needs = ready:lookup(txn.f:path())
  if needs then
    local is_ready = not drains and has_servers(txn.f, needs)
    return answer_ready(txn, is_ready and 200 or 503, '"ready":' .. tostring(is_ready))
  end
  local names = asked_apis(txn)
  local missing = {}
  for _, name in ipairs(names) do
    needs = string.match(name, "^[%w_.-]+$") and ready:lookup(name)
    if not needs then
      local shown = txn.c:json(string.sub(name, 1, 200), "utf8ps")
      local error = '"error":"no API has the name \'' .. shown .. '\' in ?api="'
      return answer_ready(txn, 404, error .. ',"request_id":"' .. txn.f:unique_id() .. '"')
    end
    if not has_servers(txn.f, needs) then
      missing[#missing + 1] = '"' .. name .. '"'
    end
  end
  local error = drains and "the gateway is stopping" or #names == 0 and "no API is deployed"
  if not error and #missing == 0 then
    return answer_ready(txn, 200, '"ready":true')
  end
  local reason = error and ',"error":"' .. error .. '"' or ""
  answer_ready(txn, 503, '"ready":false,"not_ready":[' .. table.concat(missing, ",") .. "]" .. reason)
end, 0)

-- An API key, see `operator/access/keys.py`: as a word of its own, or behind an escape such as `%20`.
local KEY = "ck_" .. string.rep("%x", 10) .. "_" .. string.rep("[%w_-]", 43) .. "%f[^%w_-]"
local WORD = "%f[%w_-]" .. KEY
local ESCAPED = "(%%%x%x)" .. KEY
-- Each change of a header reads all headers.
local MAX_KEYS = 16

-- Returns a text without keys, and their number.
local function without_keys(text)
  local words, escaped
  text, words = string.gsub(text, WORD, "")
  text, escaped = string.gsub(text, ESCAPED, "%1")
  return text, words + escaped
end

-- Removes API keys from the request: from its query, and from headers, which are deleted if a key is their whole value.
-- Sets txn.many_keys instead if more than MAX_KEYS headers have one.
core.register_action("cortex_hide_keys", { "http-req" }, function(txn)
  local count, names = 0, {}
  for name, values in pairs(txn.http:req_get_headers()) do
    for index = 0, #values do
      if string.find(values[index], WORD) or string.find(values[index], ESCAPED) then
        count, names[name] = count + 1, values
      end
    end
  end
  if count > MAX_KEYS then
    txn:set_var("txn.many_keys", true)
    return
  end
  local query, found = without_keys(txn.f:query() or "")
  if found > 0 then
    txn.http:req_set_query(query)
  end
  for name, values in pairs(names) do
    txn.http:req_del_header(name)
    for index = 0, #values do
      local rest, keys = without_keys(values[index])
      if keys == 0 or not string.find(rest, "^%s*%a*%s*$") then
        txn.http:req_add_header(name, rest)
      end
    end
  end
end, 0)

local DRAINS = 256
local DRAIN_S = 30
local DRAIN_BYTES = 1024 * 1024 * 1024

-- Whether the client still sends the body, and would not see a response. One that expects 100 Continue waits for it
-- instead, and one of gRPC reads while it sends.
local function sends_body(fetches)
  local is_grpc = string.match(fetches:req_hdr("content-type") or "", "^application/grpc")
  if is_grpc or fetches:req_hdr("expect") then
    return false
  end
  local length = tonumber(fetches:req_hdr("content-length"))
  if length then
    return length > fetches:req_body_len()
  end
  -- HTTP/2 has bodies of unknown length without a header that says so.
  local method = fetches:method()
  local is_open = fetches:fc_http_major() == 2 and method ~= "GET" and method ~= "HEAD"
  return is_open or fetches:req_hdr("transfer-encoding") ~= nil
end

local REFUSAL_HEADERS = {
  ["401"] = { "www-authenticate", "Bearer" }, ["405"] = { "allow", "GET" }, ["503"] = { "retry-after", "1" },
}

local function answer_refusal(refusal, set_status, add_header)
  local status, body = string.match(refusal, "^(%d+) (.*)$")
  set_status(tonumber(status))
  local grpc_status, message = string.match(body, "^(%d+):(.*)$")
  if grpc_status then
    add_header("grpc-status", grpc_status)
    add_header("grpc-message", (string.gsub(message, "%%", "%%25")))  -- clients decode percent signs
    add_header("content-length", "0")  -- otherwise a frame of DATA ends the response, which makes clients see UNKNOWN
    return ""
  end
  add_header("content-type", "application/json")
  add_header("content-length", tostring(#body))
  if REFUSAL_HEADERS[status] then
    add_header(table.unpack(REFUSAL_HEADERS[status]))
  end
  return body
end

-- Answers with txn.refusal, a status and a body in JSON, or the status and message of gRPC. While the client sends, it would not see this response on a
-- connection that HAProxy closes: then the request goes on to the frontend that runs cortex_drain.
core.register_action("cortex_refuse", { "http-req" }, function(txn)
  local refusal = txn:get_var("txn.refusal")
  if sends_body(txn.f) and txn.f:fe_conn("cortex-refusals") < DRAINS then
    txn.http:req_set_header("x-cortex-refusal", refusal)
    return
  end
  local reply = txn:reply()
  reply:set_body(answer_refusal(
    refusal,
    function(status) reply:set_status(status) end,
    function(name, value) reply:add_header(name, value) end
  ))
  txn:done(reply)
end, 0)

-- The answer to requests that still wait when the gateway stops. They come without a refusal.
local function stopping(headers)
  local text = "the service stopped before this request could run"
  if string.match((headers["content-type"] or {})[0] or "", "^application/grpc") then
    return "503 14:" .. text
  end
  return '503 {"error":"' .. text .. '","request_id":"' .. ((headers["x-cortex-request-id"] or {})[0] or "") .. '"}'
end

-- Responds at once, and then receives the body without keeping it.
core.register_service("cortex_drain", "http", function(applet)
  local refusal = applet.headers["x-cortex-refusal"]
  local body = answer_refusal(
    refusal and refusal[0] or stopping(applet.headers),
    function(status) applet:set_status(status) end,
    function(name, value) applet:add_header(name, value) end
  )
  applet:start_response()
  if applet.method ~= "HEAD" then
    applet:send(body)
  end
  local wanted = 65536
  repeat until #applet:receive(wanted) < wanted
end)

-- Ends a request that is drained for too long. It sees each part of the body as it arrives. Only an error in Lua ends a
-- request here; HAProxy logs it.
local Bounded = { id = "limits of drained requests", flags = filter.FLT_CFG_FL_HTX }
Bounded.__index = Bounded

function Bounded:new()
  return setmetatable({ ends = core.now().sec + DRAIN_S, bytes = 0 }, Bounded)
end

function Bounded:start_analyze(txn, channel)
  if not channel:is_resp() then
    filter.register_data_filter(self, channel)
  end
end

function Bounded:http_payload(txn, message)
  local length = message:input()
  self.bytes = self.bytes + length
  if self.bytes > DRAIN_BYTES or core.now().sec > self.ends then
    error("closed a connection whose client sends on after its request was refused", 0)
  end
  message:forward(length)
end

core.register_filter("cortex_bounded", Bounded, function(class)
  return class
end)

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
