import java.io.File;
import java.lang.reflect.Constructor;
import java.lang.reflect.Field;
import java.lang.reflect.Modifier;
import java.util.Collections;
import java.util.HashMap;
import java.util.Iterator;
import java.util.Map;
import java.util.jar.JarEntry;
import java.util.jar.JarFile;
import org.apache.flink.runtime.rest.messages.MessageHeaders;
import org.apache.flink.runtime.rest.util.RestMapperUtils;
import org.apache.flink.shaded.jackson2.com.fasterxml.jackson.databind.JavaType;
import org.apache.flink.shaded.jackson2.com.fasterxml.jackson.databind.JsonNode;
import org.apache.flink.shaded.jackson2.com.fasterxml.jackson.databind.ObjectMapper;

/**
 * Has the classes of Flink's REST client read answers: {@code FLINK_DIST_JAR EXAMPLES}, the latter answers by situation
 * by "METHOD /path/{parameter}". Prints "read" or why not, behind it the path and the situation, for paths of Flink.
 */
public class ReadAnswers {
    public static void main(String[] arguments) throws Exception {
        Map<String, MessageHeaders<?, ?, ?>> known = headers(arguments[0]);
        ObjectMapper mapper = RestMapperUtils.getFlexibleObjectMapper();
        Iterator<Map.Entry<String, JsonNode>> paths = mapper.readTree(new File(arguments[1])).fields();
        while (paths.hasNext()) {
            Map.Entry<String, JsonNode> path = paths.next();
            MessageHeaders<?, ?, ?> headers = known.get(path.getKey().replaceAll("\\{[a-z]+\\}", "*"));
            if (headers == null) {
                continue;
            }
            Class<?>[] parameters = headers.getResponseTypeParameters().toArray(new Class<?>[0]);
            JavaType type =
                    parameters.length == 0
                            ? mapper.constructType(headers.getResponseClass())
                            : mapper.getTypeFactory().constructParametricType(headers.getResponseClass(), parameters);
            Iterator<Map.Entry<String, JsonNode>> answers = path.getValue().fields();
            while (answers.hasNext()) {
                Map.Entry<String, JsonNode> answer = answers.next();
                String outcome = "read";
                try {
                    mapper.readValue(mapper.treeAsTokens(answer.getValue()), type);
                } catch (Exception problem) {
                    outcome = problem.getMessage().split("\n")[0];
                }
                System.out.println(outcome + "\t" + path.getKey() + "\t" + answer.getKey());
            }
        }
    }

    /** By "METHOD /path/*". */
    private static Map<String, MessageHeaders<?, ?, ?>> headers(String jar) throws Exception {
        Map<String, MessageHeaders<?, ?, ?>> found = new HashMap<>();
        try (JarFile file = new JarFile(jar)) {
            for (JarEntry entry : Collections.list(file.entries())) {
                String name = entry.getName();
                if (!name.startsWith("org/apache/flink/runtime/") || !name.endsWith("Headers.class")) {
                    continue;
                }
                Class<?> kind = Class.forName(name.substring(0, name.length() - 6).replace('/', '.'));
                if (!Modifier.isAbstract(kind.getModifiers()) && MessageHeaders.class.isAssignableFrom(kind)) {
                    MessageHeaders<?, ?, ?> headers = instance(kind);
                    String path = headers.getTargetRestEndpointURL().replaceAll(":[a-z]+", "*");
                    found.put(headers.getHttpMethod() + " " + path, headers);
                }
            }
        }
        return found;
    }

    private static MessageHeaders<?, ?, ?> instance(Class<?> kind) throws Exception {
        for (Field field : kind.getDeclaredFields()) {
            if (Modifier.isStatic(field.getModifiers()) && field.getType() == kind) {
                field.setAccessible(true);
                return (MessageHeaders<?, ?, ?>) field.get(null);
            }
        }
        Constructor<?> constructor = kind.getDeclaredConstructor();
        constructor.setAccessible(true);
        return (MessageHeaders<?, ?, ?>) constructor.newInstance();
    }
}
