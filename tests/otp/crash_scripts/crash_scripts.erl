%% Runs crash scripts on the supervisor of OTP.
%%
%% Reads one term per line, a list of scripts; runs them at the same time, each in a process of its own, and
%% prints the log of each: a line per event, then "done", or a line that begins with "error". See the README.
-module(crash_scripts).

-export([main/0]).
-export([start_worker/2, start_supervisor/2, log/2]).
-export([init/1, handle_call/3, handle_cast/2, handle_info/2, terminate/2]).

-define(PATIENCE, 20000).

main() ->
    ok = logger:add_handler(crash_scripts, ?MODULE, #{level => error}),
    _ = logger:remove_handler(default),
    loop().

loop() ->
    case io:read('') of
        {ok, Scripts} ->
            Runs = [spawn_monitor(fun() -> exit({log, run(Script)}) end) || Script <- Scripts],
            lists:foreach(fun report/1, Runs),
            loop();
        eof ->
            ok
    end.

report({Pid, Monitor}) ->
    receive
        {'DOWN', Monitor, process, Pid, {log, Events}} ->
            [io:format("~w ~w ~s~n", [Name, Number, What]) || {Name, Number, What} <- Events],
            io:format("done~n");
        {'DOWN', Monitor, process, Pid, Reason} ->
            io:format("error ~0p~n", [Reason])
    end.

%% A script.

run({Root, Steps, Forgets}) ->
    process_flag(trap_exit, true),
    Log = ets:new(log, [ordered_set, public]),
    ets:insert(Log, {tracer, self()}),
    case start_supervisor(Log, Root) of
        {ok, Pid} ->
            perform(Steps, Pid, Log, Forgets),
            stop(Pid);
        {error, {shutdown, {failed_to_start_child, _, _}}} ->
            ok
    end,
    collect_exits(Log),
    [Event || [Event] <- ets:match(Log, {{event, '_'}, '$1'})].

perform([], _Root, _Log, _Forgets) ->
    ok;
perform([Step | Steps], Root, Log, Forgets) ->
    step(Step, Log),
    settle(Root, Forgets, erlang:monotonic_time(millisecond) + ?PATIENCE),
    is_process_alive(Root) andalso perform(Steps, Root, Log, Forgets).

step({together, Supervisor, Acts}, Log) ->
    with_pid(Supervisor, Log, fun(Pid) ->
        ok = sys:suspend(Pid),
        [act(Act, Log, fun(Child) -> until_told_of(Pid, Child) end) || Act <- Acts],
        ok = sys:resume(Pid)
    end);
step({add, Supervisor, Child}, Log) ->
    with_pid(Supervisor, Log, fun(Pid) ->
        _ = supervisor:start_child(Pid, child_spec(Log, Child))
    end);
step({remove, Supervisor, Name}, Log) ->
    with_pid(Supervisor, Log, fun(Pid) ->
        _ = supervisor:terminate_child(Pid, Name),
        _ = supervisor:delete_child(Pid, Name)
    end);
step({wait, Milliseconds}, _Log) ->
    timer:sleep(Milliseconds);
step(Act, Log) ->
    act(Act, Log).

act(Act, Log) ->
    act(Act, Log, fun(_) -> ok end).

%% Have a worker end, and wait until it has.
act({What, Name}, Log, Then) ->
    with_pid(Name, Log, fun(Pid) ->
        Monitor = monitor(process, Pid),
        Pid ! What,
        receive
            {'DOWN', Monitor, process, Pid, _} -> Then(Pid)
        after ?PATIENCE -> exit({does_not_end, Name})
        end
    end).

with_pid(Name, Log, Do) ->
    case ets:lookup(Log, {pid, Name}) of
        [{_, Pid}] -> is_process_alive(Pid) andalso Do(Pid);
        [] -> false
    end.

%% Wait until the exit of a child has reached its supervisor, which is suspended.
until_told_of(Supervisor, Child) ->
    {messages, Messages} = process_info(Supervisor, messages),
    case [Pid || {'EXIT', Pid, _} <- Messages, Pid =:= Child] of
        [] ->
            erlang:yield(),
            until_told_of(Supervisor, Child);
        _ ->
            ok
    end.

stop(Root) ->
    Monitor = monitor(process, Root),
    exit(Root, shutdown),
    receive
        {'DOWN', Monitor, process, Root, _} -> ok
    after ?PATIENCE -> exit(root_does_not_end)
    end.

%% Wait until no supervisor of the tree has an exit of a child, or a start to try again, before it. A
%% supervisor answers a call only between two such things, and then lists the children that it knows of.
settle(Root, Forgets, Deadline) ->
    case erlang:monotonic_time(millisecond) < Deadline of
        true -> ok;
        false -> exit({does_not_settle, catch supervisor:which_children(Root)})
    end,
    case is_settled(Root, Forgets) orelse not is_process_alive(Root) of
        true ->
            ok;
        false ->
            erlang:yield(),
            settle(Root, Forgets, Deadline)
    end.

is_settled(Supervisor, Forgets) ->
    try supervisor:which_children(Supervisor) of
        Children ->
            lists:all(fun({_, Pid, _, _}) -> Pid =:= undefined orelse is_alive(Pid) end, Children)
                andalso lists:all(
                    fun({_, Pid, supervisor, _}) when is_pid(Pid) -> is_settled(Pid, Forgets);
                       (_) -> true
                    end,
                    Children
                )
                andalso (not Forgets orelse forget(Supervisor, Children))
    catch
        exit:_ -> false
    end.

is_alive(restarting) -> false;
is_alive(Pid) -> is_process_alive(Pid).

forget(Supervisor, Children) ->
    [ok = supervisor:delete_child(Supervisor, Name) || {Name, undefined, _, _} <- Children],
    true.

%% The log. An event's key is taken when it happens, so the keys are in the order of the events.

log_event(Log, Name, Number, What) ->
    ets:insert(Log, {{event, erlang:unique_integer([monotonic])}, {Name, Number, What}}).

next_number(Log, Name) ->
    ets:update_counter(Log, {number, Name}, 1, {{number, Name}, -1}).

%% A supervisor has no callback for its end. It is traced instead: the trace message bears the time, of the
%% same clock as the keys of the log, and is sent before anybody is told of the exit.
collect_exits(Log) ->
    Reference = erlang:trace_delivered(all),
    receive
        {trace_delivered, all, Reference} -> collect_delivered(Log)
    end.

collect_delivered(Log) ->
    receive
        {trace_ts, Pid, exit, Reason, {_, Key}} ->
            case ets:lookup(Log, {supervisor, Pid}) of
                [{_, {Name, Number}}] ->
                    ets:insert(Log, {{event, Key}, {Name, Number, io_lib:format("exit ~0p", [Reason])}});
                [] ->
                    failed_to_start
            end,
            collect_delivered(Log)
    after 0 -> ok
    end.

%% Of the handler of the logger: called by the supervisor that reports.
log(#{msg := {report, #{label := {supervisor, shutdown}, report := Report}}}, _Config) ->
    {Log, Name, Number} = get(crash_scripts),
    log_event(Log, Name, Number, io_lib:format("report ~0p", [proplists:get_value(reason, Report)]));
log(_Event, _Config) ->
    ok.

%% Children.

child_spec(Log, {worker, Name, Restart, _, _} = Worker) ->
    #{id => Name, start => {?MODULE, start_worker, [Log, Worker]}, restart => Restart, type => worker};
child_spec(Log, {supervisor, Name, Restart, _, _, _, _} = Supervisor) ->
    #{id => Name, start => {?MODULE, start_supervisor, [Log, Supervisor]}, restart => Restart,
      type => supervisor, shutdown => infinity}.

start_worker(Log, Worker) ->
    gen_server:start_link(?MODULE, {Log, Worker}, []).

start_supervisor(Log, {supervisor, Name, _, _, _, _, _} = Supervisor) ->
    case supervisor:start_link(?MODULE, {Log, Supervisor}) of
        {ok, Pid} ->
            [{_, Number}] = ets:lookup(Log, {number, Name}),
            % Only one that has started has an end.
            ets:insert(Log, [{{supervisor, Pid}, {Name, Number}}, {{pid, Name}, Pid}]),
            {ok, Pid};
        Error ->
            Error
    end.

%% Of both behaviours.
init({Log, {supervisor, Name, _, Strategy, Intensity, Period, Children}}) ->
    [{_, Tracer}] = ets:lookup(Log, tracer),
    1 = erlang:trace(self(), true, [procs, strict_monotonic_timestamp, {tracer, Tracer}]),
    Number = next_number(Log, Name),
    put(crash_scripts, {Log, Name, Number}),
    log_event(Log, Name, Number, "init"),
    Flags = #{strategy => Strategy, intensity => Intensity, period => Period},
    {ok, {Flags, [child_spec(Log, Child) || Child <- Children]}};
init({Log, {worker, Name, _Restart, Fails, Hooks}}) ->
    process_flag(trap_exit, true),
    Number = next_number(Log, Name),
    run_hooks(start, Number, Hooks, Log),
    case lists:member(Number, Fails) of
        true ->
            log_event(Log, Name, Number, "init boom"),
            {stop, boom};
        false ->
            ets:insert(Log, {{pid, Name}, self()}),
            log_event(Log, Name, Number, "init"),
            {ok, {Log, Name, Number, Hooks}}
    end.

handle_call(Request, _From, State) ->
    {stop, {unexpected, Request}, State}.

handle_cast(Request, State) ->
    {stop, {unexpected, Request}, State}.

handle_info(crash, _State) ->
    exit(boom);
handle_info(finish, State) ->
    {stop, normal, State}.

terminate(Reason, {Log, Name, Number, Hooks}) ->
    log_event(Log, Name, Number, io_lib:format("terminate ~0p", [Reason])),
    Reason =:= shutdown andalso run_hooks(shutdown, Number, Hooks, Log).

run_hooks(Point, Number, Hooks, Log) ->
    [act(Act, Log) || {APoint, ANumber, Act} <- Hooks, APoint =:= Point, ANumber =:= Number].
